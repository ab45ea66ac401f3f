"""Hides what TensorFlow prints when it starts; messages of others, and what comes before an exception, are shown.

Its C++ code writes these messages to the file descriptor of stderr before it reads TF_CPP_MIN_LOG_LEVEL, so that only the
descriptor can hide them.
"""

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_OURS_TO_HIDE = re.compile(
    rb"WARNING: All log messages before absl::|[IWE]\d{4} [\d:.]+ |To enable the following instructions"
)


def is_wanted() -> bool:
    """Returns whether TF_CPP_MIN_LOG_LEVEL asks for TensorFlow's INFO or WARNING messages."""
    return os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2") in ("0", "1")


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Holds what is written to the file descriptor of stderr, and then writes it without TensorFlow's messages."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines = [line for line in file if failed or not _OURS_TO_HIDE.match(line)]
            if lines:
                os.write(2, b"".join(lines))


@contextlib.contextmanager
def held_if_first() -> Iterator[None]:
    """Does the same if TensorFlow has not been imported yet and its messages are not wanted."""
    with contextlib.nullcontext() if "tensorflow" in sys.modules or is_wanted() else held():
        yield


def detect_devices() -> None:
    """Detects the devices, and hides INFO messages of TensorFlow's Python code, which it prints in notebooks only."""
    import tensorflow as tf

    if is_wanted():
        return
    logger = tf.get_logger()
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
    with held():
        tf.config.list_physical_devices()
