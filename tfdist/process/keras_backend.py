"""Refuses Keras's other backends when Keras is imported, which fails without them, or trains nothing on a strategy."""

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator

from tfdist.errors import InputError
from tfdist.process.import_hook import around_import

REMEDY = "Set KERAS_BACKEND=tensorflow"  # it goes before keras.json


def check_on_import() -> None:
    """Checks the backend when Keras is imported; at once if it is already.

    Raises:
      InputError: it is another one than TensorFlow; see `problem`.
    """
    if "keras" in sys.modules:
        check()
    around_import("keras", _checked)


def check() -> None:
    """Raises `InputError` if the backend of Keras is another one than TensorFlow."""
    if found := problem():
        raise InputError(f"{found} {REMEDY}.")


def problem() -> str:
    """Returns a sentence about another backend than TensorFlow, that Keras has or will have; "" if there is none."""
    backend, place = _backend()
    rule = "Keras must compute with TensorFlow, on which tfdist distributes."
    return "" if backend == "tensorflow" else f"{rule} Received: the backend {backend} {place}."


def _backend() -> tuple[str, str]:
    """Returns the backend and where it comes from, as Keras looks for it."""
    if config := getattr(sys.modules.get("keras"), "config", None):  # it has been imported
        return config.backend(), "in this process"
    if backend := os.environ.get("KERAS_BACKEND"):
        return backend, "by KERAS_BACKEND"
    home = pathlib.Path.home() if os.access(pathlib.Path.home(), os.W_OK) else pathlib.Path("/tmp")
    file = pathlib.Path(os.environ.get("KERAS_HOME") or home / ".keras").expanduser() / "keras.json"
    try:
        return str(json.loads(file.read_bytes())["backend"]), f"in {file}"
    except (OSError, ValueError, TypeError, KeyError):  # of which Keras has its own errors
        return "tensorflow", ""


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    check()
    yield
