"""Imports TensorFlow for a command, without the messages that its C++ code prints during the import."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator


def load_tensorflow() -> float:
    """Imports TensorFlow and Keras, which takes seconds and is shown on a terminal, and detects devices.

    Returns:
      The seconds that it took.
    """
    from tfdist.reporting.display import status  # not needed by `--help`

    began = time.monotonic()
    is_new = "tensorflow" not in sys.modules
    with status("Loading TensorFlow ...") if is_new else contextlib.nullcontext(), _quiet():
        import keras  # noqa: F401 - so that it is there
        import tensorflow as tf

        tf.config.list_physical_devices()
    return time.monotonic() - began


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses output to the file descriptor of stderr, but prints it if there is an exception.

    Also disables later INFO and WARNING messages, unless TF_CPP_MIN_LOG_LEVEL is set.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        kept = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
