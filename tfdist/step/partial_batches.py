"""Results for all rows of a batch and for some of them, as replicas would compute them."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import NoCommunication, Recording, using
from tfdist.distribution.strategy import HasCollectives, Strategy
from tfdist.step.tolerance import Tolerance


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
    def of(cls, function: Callable[[slice], Any], rows: int, *, in_parts: bool = True) -> "PartialResults":
        """Calls a function of slices: of all rows twice, and of the parts of two partitions.

        Parts of different sizes show what is no mean of equal ones, and single rows show what large parts average out.

        Args:
          function: takes a slice of rows.
          rows: number of rows.
          in_parts: whether to call it for parts; otherwise, there are no partitions.
        """
        unequal = itertools.starmap(slice, itertools.pairwise(sorted({0, 1, rows // 3, rows})))
        partitions = [list(unequal), [slice(row, row + 1) for row in range(rows)]] if in_parts else []
        every_row = slice(0, rows)
        return cls(function(every_row), function(every_row), [list(map(function, parts)) for parts in partitions])

    def each(self, function: Callable[[Any], Any]) -> "PartialResults":
        """Returns the results of a function of each."""
        partitions = [list(map(function, parts)) for parts in self.partitions]
        return PartialResults(function(self.full), function(self.again), partitions)

    def add_up(self, tolerance: Tolerance) -> bool:
        """Returns whether arrays for all rows, as far as they are finite and repeatable, are the sums of those for parts.

        Results must be lists of arrays.

        Args:
          tolerance: tolerance of sums, relative to the largest of them: terms of different signs may cancel.
        """
        repeated = zip(self.full, self.again, strict=True)
        if not all(np.array_equal(a, b) and np.all(np.isfinite(a)) for a, b in repeated):
            return True
        for parts in self.partitions:
            for whole, values in zip(self.full, map(np.stack, zip(*parts, strict=True)), strict=True):
                scale = np.maximum(np.abs(whole), np.sum(np.abs(values), axis=0, dtype=np.float64))
                difference = np.abs(np.sum(values, axis=0, dtype=np.float64) - whole)
                if not np.all(difference <= tolerance.relative * scale + 1e-12):  # a part may be NaN
                    return False
        return True


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


def communicates(function: Callable[[], Any], strategy: Strategy | None) -> bool:
    """Returns whether a function communicates between replicas, as by `tfdist.gather_rows`; it is only traced.

    Args:
      function: function without arguments.
      strategy: on whose replicas it would run; None if outside of replicas.
    """
    if not isinstance(strategy, HasCollectives):
        return False
    recorded = Recording(NoCommunication(strategy.collectives))

    def traced() -> None:
        with using(recorded), keras_internals.neutral(0), keras_internals.functions_inlined():
            function()

    tf.function(lambda: strategy.run(traced), autograph=False).get_concrete_function()
    return bool(recorded.calls)
