"""Refuses Keras's other backends when Keras is imported: without TensorFlow, nothing is distributed."""

import json
import os
import pathlib
import sys
from typing import Any

from tfdist.errors import InputError

REMEDY = "Set KERAS_BACKEND=tensorflow"  # it goes before keras.json


class _Finder:
    """Finds no module, but checks the backend before Keras is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """See `importlib.abc.MetaPathFinder`."""
        if name == "keras":
            check()


def check_on_import() -> None:
    """Makes the import of Keras raise `InputError` for another backend than TensorFlow; if it is imported, raises it now."""
    if "keras" in sys.modules:
        check()
    sys.meta_path.insert(0, _Finder())


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
    file = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras"), "keras.json").expanduser()
    try:
        return str(json.loads(file.read_bytes())["backend"]), f"in {file}"
    except (OSError, ValueError, TypeError, KeyError):  # of which Keras has its own errors
        return "tensorflow", ""
