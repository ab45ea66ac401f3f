"""Turns errors of TensorFlow about examples that cannot be read into one line that names the file."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist.data.examples import Examples

_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.DataLossError,
    tf.errors.UnknownError,
)
_READING = "IteratorGetNext"  # the operation in which TensorFlow reads the next element


@contextlib.contextmanager
def explained_reading(source: Examples) -> Iterator[None]:
    """Context that raises an `InputError` instead of TensorFlow's error if the examples that are read know the cause."""
    try:
        yield
    except _ERRORS as error:
        cause = source.explain(error) if _READING in str(error) else None
        if cause is None:
            raise
        raise cause from error
