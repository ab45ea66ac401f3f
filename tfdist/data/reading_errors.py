"""Turns TensorFlow's errors about unreadable examples into one line that names the file."""

import concurrent.futures
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdist.data.examples import Examples
from tfdist.errors import InputError

_ERRORS = (
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.UnknownError,
)
_READ_OPERATION = "IteratorGetNext"  # the operation that reads the next element
_EXAMPLES_AT_ONCE = 1024
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def explain_reading_errors(source: Examples) -> Iterator[None]:
    """Replaces a TensorFlow error with the `InputError` that explains it, if the examples know the cause."""
    try:
        yield
    except _ERRORS as error:
        cause = source.explain(error) if _READ_OPERATION in str(error) else None
        if cause is None:
            raise
        raise cause from error


def first_unreadable(check: Callable[[int], None], size: int, seconds: float = 300.0) -> InputError | None:
    """Searches for an example that cannot be read, in parallel, for a limited time because other processes may be waiting.

    `check` reads the example at an index, and raises `InputError` if it is unreadable. Returns the error of the first
    unreadable example; None if there is none or the time is over.
    """
    _log.warning("Failed to read an example. Checking %d examples to find it (up to %.0f s).", size, seconds)

    def try_check(index: int) -> InputError | None:
        try:
            check(index)
        except InputError as error:
            return error
        return None

    start_time = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, size, _EXAMPLES_AT_ONCE):
            indices = range(start, min(start + _EXAMPLES_AT_ONCE, size))
            errors = [error for error in pool.map(try_check, indices) if error]
            if errors or time.monotonic() - start_time > seconds:
                return errors[0] if errors else None
    return None
