"""Hides what TensorFlow prints when it starts; messages of others, and what comes before an exception, are shown.

Its C++ code writes these messages to the file descriptor of stderr before it reads TF_CPP_MIN_LOG_LEVEL, so that only the
descriptor can hide them.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator

from tfdist.process.import_hook import around_import

_STARTUP_MESSAGE = re.compile(
    rb"WARNING: All log messages before absl::|[IWE]\d{4} [\d:.]+ |To enable the following instructions"
)


def is_wanted() -> bool:
    """Returns whether TF_CPP_MIN_LOG_LEVEL asks for TensorFlow's INFO or WARNING messages."""
    return os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2") in ("0", "1")


@contextlib.contextmanager
def filtered_stderr() -> Iterator[None]:
    """Holds what is written to the file descriptor of stderr, and then writes it without TensorFlow's messages."""
    import tempfile  # not needed to import tfdist

    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile())
            kept = os.dup(2)
        except OSError:  # no directory for the file, or no stderr
            file = None
        if file is None:
            yield
            return
        _flush()
        os.dup2(file.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        except KeyboardInterrupt:
            failed = False
            raise
        finally:
            _flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines = [line for line in file if failed or not _STARTUP_MESSAGE.match(line)]
            with contextlib.suppress(OSError):  # it must not hide the exception
                os.write(2, b"".join(lines))


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


def filter_stderr_on_import() -> None:
    """Hides TensorFlow's messages when it is imported for the first time, by whatever module, unless they are wanted."""
    around_import("tensorflow", lambda: contextlib.nullcontext() if is_wanted() else filtered_stderr())


def detect_devices() -> None:
    """Detects the devices, and hides INFO messages of TensorFlow's Python code, which it prints in notebooks only."""
    import logging

    import tensorflow as tf

    if is_wanted():
        return
    logger = tf.get_logger()
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
    with filtered_stderr():
        tf.config.list_physical_devices()
