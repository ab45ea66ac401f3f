"""Hides the startup messages of TensorFlow, and sets environment variables temporarily."""

import contextlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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

    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile())
            saved_stderr = os.dup(2)
        except OSError:  # no temporary directory, or no stderr
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
            os.dup2(saved_stderr, 2)
            os.close(saved_stderr)
            file.seek(0)
            lines = [line for line in file if failed or not _STARTUP_MESSAGE.match(line)]
            with contextlib.suppress(OSError):  # must not hide the exception
                os.write(2, b"".join(lines))


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


class _Finder:
    """Finds the module `tensorflow`, with a loader that filters messages during the import."""

    _is_searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != "tensorflow" or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec and spec.loader and not shows_startup_messages():
            # Has the methods that the import system calls.
            spec.loader = _FilteringLoader(spec.loader, self)  # type: ignore[assignment]
        return spec


class _FilteringLoader:
    """Wraps a loader, and filters messages during the import."""

    def __init__(self, loader: Any, finder: _Finder):
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self._finder)
        with filter_stderr():
            self._loader.exec_module(module)


def filter_stderr_on_import() -> None:
    """Hides TensorFlow's startup messages when any module imports it first, unless they are enabled."""
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def detect_devices() -> None:
    """Detects the devices, and hides TensorFlow's INFO messages, which Python code prints in notebooks only."""
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
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables in a context, and restores them on exit.

    For variables that a library reads when it starts, and that child processes should not inherit.
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
