"""Batches of arrays as a `PyDataset` and as an endless generator."""

from collections.abc import Iterator
from typing import Any

import keras


class ArrayBatches(keras.utils.PyDataset):
    """Batches of `size` rows of a structure of arrays."""

    def __init__(self, arrays: Any, size: int):
        super().__init__()
        self._arrays, self._size = arrays, size

    def __len__(self) -> int:
        return -(-len(keras.tree.flatten(self._arrays)[0]) // self._size)

    def __getitem__(self, index: int) -> Any:
        return keras.tree.map_structure(lambda x: x[self._size * index : self._size * (index + 1)], self._arrays)

    def repeated(self) -> Iterator[Any]:
        while True:
            yield from map(self.__getitem__, range(len(self)))
