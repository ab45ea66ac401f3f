"""Hides the startup messages of TensorFlow, and sets environment variables temporarily."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping

from tfdist.cluster import keras_backend
from tfdist.cluster.terminal import show_temporarily

# TensorFlow's startup messages. Other messages, and all messages before an exception, are shown. C++ code writes them to the
# file descriptor of stderr before it reads TF_CPP_MIN_LOG_LEVEL, so only redirection can hide them.
_STARTUP_MESSAGE = re.compile(
    rb"WARNING: All log messages before absl::|[IWE]\d{4} [\d:.]+ |To enable the following instructions"
)


def shows_startup_messages() -> bool:
    """Returns whether TF_CPP_MIN_LOG_LEVEL enables TensorFlow's INFO or WARNING messages."""
    return os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2") in ("0", "1")


@contextlib.contextmanager
def filter_stderr() -> Iterator[None]:
    """Context that buffers stderr and writes it on exit, without TensorFlow's startup messages."""
    import tempfile  # not needed to import tfdist

    try:
        file, saved_stderr = tempfile.TemporaryFile(), os.dup(2)
    except OSError:  # no temporary directory, or no stderr
        yield
        return
    with file:
        _flush()
        os.dup2(file.fileno(), 2)
        failed = False
        try:
            yield
        except BaseException as error:
            failed = not isinstance(error, KeyboardInterrupt)
            raise
        finally:
            _flush()
            os.dup2(saved_stderr, 2)
            os.close(saved_stderr)
            file.seek(0)
            lines = [line for line in file if failed or not _STARTUP_MESSAGE.match(line)]
            with contextlib.suppress(OSError):  # must not hide the exception
                os.write(2, b"".join(lines))


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


def filter_import() -> contextlib.AbstractContextManager[None]:
    """Returns a context that hides the messages of the import of TensorFlow, unless they are enabled."""
    is_shown = "tensorflow" in sys.modules or shows_startup_messages()
    return contextlib.nullcontext() if is_shown else filter_stderr()


def detect_devices() -> None:
    """Detects the devices, and hides INFO messages of TensorFlow's Python logger, which appear only in notebooks."""
    import logging

    import tensorflow as tf

    if shows_startup_messages():
        return
    logger = tf.get_logger()
    if logger.level == logging.INFO:
        logger.setLevel(logging.WARNING)
    with filter_stderr():
        tf.config.list_physical_devices()


@contextlib.contextmanager
def temporary_environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables in a context, and restores them on exit.

    Use it for variables that a library reads when it starts, and that child processes should not inherit.
    """
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def load_tensorflow() -> float:
    """Imports TensorFlow and Keras, detects devices, and returns the seconds that it took.

    Also disables later INFO and WARNING messages, unless TF_CPP_MIN_LOG_LEVEL is set.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    keras_backend.check()
    start_time = time.monotonic()
    with show_temporarily("Loading TensorFlow ..."), filter_stderr():
        import keras  # noqa: F401 - imported here so that its import time is included
        import tensorflow as tf

        tf.config.list_physical_devices()
    return time.monotonic() - start_time
