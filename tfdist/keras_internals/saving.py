"""Internals of Keras's model files."""

import contextlib
from collections.abc import Iterator

from keras.src.saving import saving_lib


@contextlib.contextmanager
def weights_in_file() -> Iterator[None]:
    """Context in which Keras writes the weights of a model into a file, one at a time, and then the file into the `.keras`.

    Otherwise it has a copy of all weights in memory, unless that of the host is too small: it does not see a limit of
    the process.
    """
    is_sufficient = saving_lib.is_memory_sufficient
    saving_lib.is_memory_sufficient = lambda model: False
    try:
        yield
    finally:
        saving_lib.is_memory_sufficient = is_sufficient
