"""Imports TensorFlow for a command, without the messages of its C++ code."""

import os
import time

from tfdist.cluster import quiet_tensorflow
from tfdist.cluster.terminal import show_temporarily


def load_tensorflow() -> float:
    """Imports TensorFlow and Keras, detects devices, and returns the seconds that it took.

    Also disables later INFO and WARNING messages, unless TF_CPP_MIN_LOG_LEVEL is set.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    start_time = time.monotonic()
    with show_temporarily("Loading TensorFlow ..."), quiet_tensorflow.filter_stderr():
        import keras  # noqa: F401 - imported here so that its import time is included
        import tensorflow as tf

        tf.config.list_physical_devices()
    return time.monotonic() - start_time
