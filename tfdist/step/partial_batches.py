"""Results for all rows of a batch and for some of them, as replicas would compute them."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy


class PartialResults(NamedTuple):
    """Results of a function for all rows of a batch, and for parts of them.

    Attributes:
      full: for all rows.
      again: for all rows again.
      partitions: for each part of each partition of the rows.
    """

    full: Any
    again: Any
    partitions: list[list[Any]]

    @classmethod
    def of(cls, function: Callable[[slice], Any], rows: int) -> "PartialResults":
        """Calls a function of slices.

        Parts of different sizes show what is no mean of equal ones, and single rows show what large parts average out.
        """
        unequal = itertools.starmap(slice, itertools.pairwise(sorted({0, 1, rows // 3, rows})))
        partitions = [list(unequal), [slice(row, row + 1) for row in range(rows)]]
        every_row = slice(0, rows)
        return cls(function(every_row), function(every_row), [list(map(function, parts)) for parts in partitions])

    def each(self, function: Callable[[Any], Any]) -> "PartialResults":
        """Returns the results of a function of each."""
        partitions = [list(map(function, parts)) for parts in self.partitions]
        return PartialResults(function(self.full), function(self.again), partitions)


def computed_for(function: Callable[..., Any], rows: Any, strategy: Strategy | None) -> Callable[[Any, slice], Any]:
    """Returns a call that computes a function of a part of rows, as arrays, on the first replica of this process.

    It is traced once, for any number of rows, as a step is, and every variable that it assigns is restored.

    Args:
      function: takes the number of the first row and the rows.
      rows: structure of tensors.
      strategy: on whose replicas the function runs; None to run it outside of replicas.
    """
    spec = keras.tree.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), rows)
    run = strategy.run if strategy else lambda called, *given: called(*given)
    signature = [tf.TensorSpec([], tf.int64), spec]
    traced = tf.function(lambda *given: run(function, *given), signature, autograph=False)

    def compute(given: Any, part: slice) -> Any:
        own = keras.tree.map_structure(lambda leaf: leaf[part], given)
        with keras_internals.variables_restored(traced.get_concrete_function()):
            found = traced(tf.constant(part.start, tf.int64), own)
        return tf.nest.map_structure(lambda leaf: np.asarray(strategy.local(leaf)[0] if strategy else leaf), found)

    return compute
