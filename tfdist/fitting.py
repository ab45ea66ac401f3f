"""Whether a model, its loss and its metrics fit the data: what Keras and TensorFlow say of it, in one line with the place."""

import contextlib
import pathlib
import traceback
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.engine_errors import one_line
from tfdist.errors import InputError, TfdistError

_LONGEST_CAUSE = 300
_LIBRARIES = tuple(str(pathlib.Path(library.__file__).parent) for library in (keras, tf))


@contextlib.contextmanager
def must_fit(element_spec: Any) -> Iterator[None]:
    """Inside, an error of shapes, dtypes or label values that Keras or TensorFlow raises becomes an `InputError`.

    Args:
      element_spec: a structure (x, y) or (x, y, sample_weight) of `tf.TensorSpec`, of one example.
    """
    try:
        yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, TfdistError) or not frames[-1].filename.startswith(_LIBRARIES):
            raise
        x, y, *_ = element_spec
        cause = _cause(error)
        raise InputError(
            f"Model, loss and metrics must fit the data. Received: examples with x {_written(x)}, y {_written(y)}; "
            f"{type(error).__name__}: {cause if len(cause) <= _LONGEST_CAUSE else f'{cause[:_LONGEST_CAUSE]}...'} "
            f"({_place(frames)}). Change the model, --loss or --metrics, or the data."
        ) from error


def _cause(error: Exception) -> str:
    """The error's message in one line; of one that TensorFlow raised while it ran a graph, the line that says what is wrong."""
    if not isinstance(error, tf.errors.OpError):
        return one_line(str(error)).rstrip(".")
    lines = [line.strip() for line in error.message.splitlines()]
    return [line for line in lines if line and not line.startswith("[[")][-1]


def _written(specs: Any) -> str:
    written = keras.tree.map_structure(lambda spec: f"{spec.dtype.name}{list(spec.shape)}", specs)
    return str(written).replace("'", "")


def _place(frames: traceback.StackSummary) -> str:
    """The last line outside of the libraries and their callers' decorators: a user's own layer, or ours."""
    frame = next((f for f in reversed(frames) if not f.filename.startswith(_LIBRARIES)), frames[-1])
    return f"{frame.filename}, line {frame.lineno}"
