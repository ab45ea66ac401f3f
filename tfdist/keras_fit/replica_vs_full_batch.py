"""Runs a model's code on some rows of a batch in two ways: distributed over the replicas, and as one batch on each.

Randomness and side effects are disabled: random layers pass on their inputs, and variables are restored at the end.
"""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica, using
from tfdist.collectives.gathering import gathered
from tfdist.collectives.trace_check import TRACING_SECONDS
from tfdist.data.batches import ReplicaRows
from tfdist.distribution.strategy import HasCollectives
from tfdist.errors import InputError
from tfdist.errors.engine_errors import described
from tfdist.keras_fit.one_device import Replica
from tfdist.keras_fit.replica_batch import few_rows

Found = TypeVar("Found")
Code = Callable[[Any, Replica], Any]  # (batch, replica that has it) -> structure of tensors
_numbers = itertools.count()


class NeedsAllRowsError(Exception):
    """The result for a batch cannot be combined from the results for its parts; the message names the difference."""


def either_draws(compare: Callable[[bool], Found]) -> Found:
    """Compares with draws that differ between rows and, if that fails, with draws that are equal; see `BothWays.run`.

    If code draws numbers for rows that are not in the batch, such as for both a real and a generated image per row, the
    numbers of the rows do not match, and only equal draws give comparable results.

    Args:
      compare: called with `rows_differ`; raises `NeedsAllRowsError` for a difference.
    """
    try:
        return compare(True)
    except NeedsAllRowsError:
        return compare(False)


class BothWays:
    """Runs the code of a step or a prediction in both ways. All processes must call each method together."""

    def __init__(self, strategy: HasCollectives, code: Code):
        """Initializes the comparison.

        Args:
          strategy: strategy on which the code runs.
          code: the code as it would run on one device.
        """
        self._strategy, self._code = strategy, code

    def run(self, batch: Any, rows_differ: bool) -> tuple[Any, Any]:
        """Runs the code in both ways.

        Args:
          batch: a `ReplicaRows` in the form that `Strategy.run` accepts.
          rows_differ: whether the draw for a row depends on its index in the batch; otherwise all rows draw the same.

        Returns:
          The replicas' results for their own rows, for `Strategy.run`, and the result for all rows.

        Raises:
          NeedsAllRowsError: the code fails on a part of the rows.
        """
        collectives = self._strategy.collectives

        def of_own_rows(own_rows: ReplicaRows) -> Any:
            few = few_rows(own_rows, collectives)
            return self._called(
                few.batch, Replica(collectives, few.rows, few.total), few.first if rows_differ else None
            )

        def of_all_rows(own_rows: ReplicaRows) -> Any:
            few = few_rows(own_rows, collectives)
            alone = Replica(OneReplica(), few.total, few.total, has_all_rows=True)
            return self._called(gathered(few.batch, collectives), alone, 0 if rows_differ else None)

        ours = self._attempt(of_own_rows, batch)
        return ours, self.first(self._attempt(of_all_rows, batch))

    def first(self, values: Any) -> Any:
        """Returns the values of this process's first replica."""
        return tf.nest.map_structure(lambda value: self._strategy.local(value)[0], values)

    def agree(self, problem: str) -> None:
        """Raises `NeedsAllRowsError` on every peer if any of them has a problem; empty for none."""
        everyone = self._strategy.peers.gather(f"first batch/{next(_numbers)}", problem, TRACING_SECONDS)
        if found := next((each for each in everyone if each), ""):
            raise NeedsAllRowsError(found)

    def _called(self, batch: Any, replica: Replica, first_row: int | tf.Tensor | None) -> Any:
        with using(replica.collectives), keras_internals.neutral(first_row), keras_internals.functions_inlined():
            return self._code(batch, replica)

    def _attempt(self, replica_function: Callable[[ReplicaRows], Any], batch: Any) -> Any:
        function = tf.function(lambda own_rows: self._strategy.run(replica_function, own_rows), autograph=False)
        found, problem = None, ""
        try:
            with keras_internals.variables_restored(function.get_concrete_function(batch)):
                found = function(batch)
        except InputError:
            raise
        except (tf.errors.InvalidArgumentError, ValueError, TypeError) as error:
            problem = described(error)
        self.agree(problem)
        return found
