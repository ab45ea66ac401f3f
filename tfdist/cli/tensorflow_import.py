"""Imports TensorFlow for a command, without the messages that its C++ code prints during the import."""

import os
import time

from tfdist.cluster import quiet_tensorflow
from tfdist.cluster.terminal import showing


def load_tensorflow() -> float:
    """Imports TensorFlow and Keras, which takes seconds and is shown on a terminal, and detects devices.

    Also disables later INFO and WARNING messages, unless TF_CPP_MIN_LOG_LEVEL is set.

    Returns:
      The seconds that it took.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    began = time.monotonic()
    with showing("Loading TensorFlow ..."), quiet_tensorflow.filtered_stderr():
        import keras  # noqa: F401 - so that it is there
        import tensorflow as tf

        tf.config.list_physical_devices()
    return time.monotonic() - began
