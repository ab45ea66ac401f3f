"""Checks that the backend of Keras is TensorFlow."""

import json
import os
import pathlib
import sys

from tfdist.errors import InputError

REMEDY = "Set KERAS_BACKEND=tensorflow"  # it overrides keras.json


def check() -> None:
    """Raises `InputError` if the backend of Keras is not TensorFlow."""
    if text := problem():
        raise InputError(f"{text} {REMEDY}.")


def problem() -> str:
    """Returns an error message if the backend of Keras, current or configured, is not TensorFlow; otherwise an empty string."""
    backend, origin = _find_backend()
    rule = "Keras must use the TensorFlow backend."
    return "" if backend == "tensorflow" else f"{rule} Received: the backend {backend} {origin}."


def _find_backend() -> tuple[str, str]:
    if config := getattr(sys.modules.get("keras"), "config", None):  # already imported
        return config.backend(), "in this process"
    if backend := os.environ.get("KERAS_BACKEND"):
        return backend, "set by KERAS_BACKEND"
    file = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras"), "keras.json").expanduser()
    try:
        return str(json.loads(file.read_bytes())["backend"]), f"in {file}"
    except (OSError, ValueError, TypeError, KeyError):  # Keras raises its own errors for these
        return "tensorflow", ""
