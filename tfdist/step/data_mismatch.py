"""Reports data that does not fit a model, its loss or its metrics, as one line with the cause and the place."""

import contextlib
import os
import pathlib
import re
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import InputError, TfdistError, engine_errors
from tfdist.errors.engine_errors import described, one_line, refusal_inside, shortened

_CAST = re.compile(r"Cast \w+ to \w+ is not supported")  # any other lack of an implementation is not the data's fault
_PARTS = ("x", "y", "sample_weight")
_KERAS, _TENSORFLOW = (str(pathlib.Path(library.__file__).parent) + os.sep for library in (keras, tf))
_LIBRARIES = (_KERAS, _TENSORFLOW)
_ROOT = pathlib.Path(__file__).parents[2]
_TFDIST = tuple(str(_ROOT / package) + os.sep for package in ("tfdist", "strategies"))
_WRAPPERS = tuple(str(_ROOT / "tfdist" / package) + os.sep for package in ("keras_internals", "pipelining"))
_PYTHON = (threading.__file__, contextlib.__file__)  # between a strategy and what it calls
_NOT_OF_THE_MODEL = re.compile(r"IteratorGetNext|PyFunc")  # reading data, or Python code in the graph, failed
_XLA = re.compile(r"[^\n]*\bXLA_\w+_JIT\b[^\n]*|[^\n]*\btf2xla\b[^\n]*")
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
# Words in errors caused by data that does not fit; any other error is a bug, and is raised unchanged.
_OF_THE_DATA = re.compile(
    r"shape|rank|dim|size|dtype|type|cast|incompatible|compatible|broadcast|label|input|structure|outputs|range|bound|argument",
    re.IGNORECASE,
)
_OF_THE_ENGINE = re.compile(r"Distributed\w*Variable|replica context|strategy\.scope|SymbolicTensor")
_STEPS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")  # methods a model may override
_LOCATION = re.compile(r'^File "(.+)", line (\d+)', re.MULTILINE)


@contextlib.contextmanager
def must_fit(element_spec: Any) -> Iterator[None]:
    """Context that turns errors of Keras or TensorFlow about shapes, dtypes or labels into `InputError`.

    An error is raised unchanged if no code of Keras was running (reading data, compressing gradients), or if it was
    raised by user code, such as a layer or a loss function, whose traceback is more helpful.

    Args:
      element_spec: structure (x,), (x, y) or (x, y, sample_weight) of `tf.TensorSpec`, of one example.
    """
    try:
        yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        if isinstance(error, tf.errors.UnimplementedError) and not _CAST.search(error.message):
            raise
        if refusal := refusal_inside(error):
            raise refusal from error
        if refused := _XLA.search(str(error)):
            raise not_compilable(refused[0]) from error
        locations = _graph_locations(error) if isinstance(error, tf.errors.OpError) else _locations(error)
        if isinstance(error, TfdistError) or not _in_keras(locations) or _is_of_own_step(error):
            raise
        if not _OF_THE_DATA.search(str(error)) or _OF_THE_ENGINE.search(str(error)):
            raise
        parts = [f"{name} {_text_of(part)}" for name, part in zip(_PARTS, element_spec, strict=False)]
        if match := _LABEL.search(engine_errors.cause(error)):  # the rest of the message is all labels of the batch
            raise InputError(
                f"Labels must be in 0..{int(match[2]) - 1}, because the model has {match[2]} outputs. Received: {match[1]}. "
                f"Number the classes from 0, or give the model's last layer more units.{_notes(error)}"
            ) from error
        raise InputError(
            f"Model, loss and metrics must fit the data. Received: examples with {', '.join(parts)}; "
            f"{described(error)}"
            f"{_user_code(locations)}. Change the model, --loss or --metrics, or the data.{_notes(error)}"
        ) from error


def not_compilable(cause: str) -> InputError:
    """Returns the error for a step that XLA cannot compile, with the cause."""
    return InputError(
        "--jit_compile needs a forward and backward pass that XLA compiles and that does not communicate (synchronized "
        f"BatchNorm and masked losses do). Received: {shortened(one_line(cause))} Leave --jit_compile out, or change the "
        "model."
    )


def _locations(error: BaseException) -> list[tuple[str, str]]:
    """Returns file and line of each call, innermost last; without wrappers around methods of Keras."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(f.filename, str(f.lineno)) for f in frames if not f.filename.startswith(_WRAPPERS)]


def _graph_locations(error: tf.errors.OpError) -> list[tuple[str, str]]:
    """Returns the same for the creation of the failed operation; empty if it is not an operation of the model."""
    if _NOT_OF_THE_MODEL.search(error.message):
        return []
    return [(f"{os.sep}{path.lstrip(os.sep)}", line) for path, line in _LOCATION.findall(_stripped(error.message))]


def _is_of_own_step(error: BaseException) -> bool:
    """Returns whether the error was raised in a step overridden by the model, whose author should see it unchanged."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name in _STEPS and not frame.filename.startswith((*_LIBRARIES, *_TFDIST)) for frame in frames)


def _in_keras(locations: list[tuple[str, str]]) -> bool:
    return any(path.startswith(_KERAS) for path, _ in locations) and locations[-1][0].startswith(_LIBRARIES)


def _stripped(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def _text_of(specs: Any) -> str:
    written = keras.tree.map_structure(lambda spec: f"{spec.dtype.name}{list(spec.shape)}", specs)
    return str(written).replace("'", "")


def _user_code(locations: list[tuple[str, str]]) -> str:
    """Returns the innermost place in the user's code, such as a custom layer, in parentheses; nothing if there is none."""
    outside = (
        location for location in reversed(locations) if not location[0].startswith((*_LIBRARIES, *_TFDIST, *_PYTHON))
    )
    return next((f" ({path}, line {line})" for path, line in outside), "")


def _notes(error: BaseException) -> str:
    return "".join(f" {note}" for note in getattr(error, "__notes__", ()))
