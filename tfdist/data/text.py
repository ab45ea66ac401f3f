"""Text as bytes, for language models; includes a text available everywhere, the source of Python's standard library."""

import os
import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdist.data.data_set import DataSet
from tfdist.data.examples import Element
from tfdist.data.source import Source
from tfdist.errors import InputError

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_TEST_SHARE = 20  # fraction is 1 / this


class TextSource(Source):
    """Consecutive windows of a text: x is `length` bytes, y the same shifted by one; int32 [length] each."""

    def __init__(self, text: np.ndarray, length: int):
        """Copies the text.

        Args:
          text: uint8 [n], longer than `length`. An incomplete window at the end is not used.
          length: length of a window, at least 1.

        Raises:
          InputError: the text does not contain a whole window.
        """
        self.size = (len(text) - 1) // length if length > 0 else 0
        if self.size < 1:
            raise InputError(f"A text must be longer than a window. Received: {len(text)} bytes, length={length}.")
        self._length = length
        with tf.device("CPU:0"):
            self._text = tf.constant(np.asarray(text, np.uint8)[: self.size * length + 1])

    def fetch(self, indices: tf.Tensor) -> Element:
        """See base class."""
        places = indices[:, None] * self._length + tf.range(self._length + 1, dtype=tf.int64)
        window = tf.cast(tf.gather(self._text, places), tf.int32)
        return window[:, :-1], window[:, 1:]


def text(length: int = 128, max_bytes: int = 8_000_000) -> DataSet:
    """The .py files of Python's standard library, in sorted order; the last twentieth is the test part.

    Processes that share a run need the same version of Python, to have the same text.

    Args:
      length: bytes per example.
      max_bytes: maximum number of bytes to read.
    """
    content = np.frombuffer(_standard_library(max_bytes), np.uint8)
    border = len(content) - len(content) // _TEST_SHARE
    return DataSet("text", TextSource(content[:border], length), TextSource(content[border:], length), (length,), 256)


def _standard_library(max_bytes: int) -> bytes:
    content = bytearray()
    for path in _python_files():
        if len(content) >= max_bytes:
            break
        content += path.read_bytes()
    return bytes(content[: max(max_bytes, 0)])


def _python_files() -> Iterator[pathlib.Path]:
    for directory, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        yield from (pathlib.Path(directory, name) for name in sorted(files) if name.endswith(".py"))
