"""Code of a model, run on a few rows of a batch in two ways: dealt to the replicas, and as one batch on each of them.

Without chance and without effects: random layers pass their inputs on, and variables have their values of before at the end.
"""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica, using
from tfdist.collectives.trace_check import TRACING_SECONDS
from tfdist.data.batches import Dealt
from tfdist.distribution.strategy import HasCollectives
from tfdist.errors import InputError
from tfdist.errors.engine_errors import one_line
from tfdist.keras_fit.gathering import gathered
from tfdist.keras_fit.one_device import Replica
from tfdist.keras_fit.replica_batch import few_rows

Found = TypeVar("Found")
Code = Callable[[Any, Replica], Any]  # of a batch and the replica that has it; returns a structure of tensors
_numbers = itertools.count()


class NeedsAllRowsError(Exception):
    """What code computes from a batch cannot be put together from what it computes from parts; says how that showed."""


def either_draws(compare: Callable[[bool], Found]) -> Found:
    """Compares with draws that differ between rows, and if that finds a difference with equal ones; see `BothWays.run`.

    Code that draws for other rows than the batch has, as for a real and a generated image of each, numbers them anew, so that
    only equal draws show what it computes.

    Args:
      compare: of `rows_differ`; raises `NeedsAllRowsError` for a difference.
    """
    try:
        return compare(True)
    except NeedsAllRowsError:
        return compare(False)


class BothWays:
    """Runs the code of a step or of a prediction. All processes come to each of its methods together."""

    def __init__(self, strategy: HasCollectives, code: Code):
        """Args: strategy: where it runs; code: as it is on one device."""
        self._strategy, self._code = strategy, code

    def run(self, batch: Any, rows_differ: bool) -> tuple[Any, Any]:
        """Runs the code.

        Args:
          batch: of `Dealt`, as `Strategy.run` takes it.
          rows_differ: whether what is drawn for a row follows from its place in the batch; otherwise rows draw the same.

        Returns:
          What each replica has computed from its rows, for `Strategy.run`, and what one has computed from all rows.

        Raises:
          NeedsAllRowsError: the code fails on some of the rows.
        """
        collectives = self._strategy.collectives

        def of_own_rows(dealt: Dealt) -> Any:
            few = few_rows(dealt, collectives)
            return self._called(
                few.batch, Replica(collectives, few.rows, few.total), few.first if rows_differ else None
            )

        def of_all_rows(dealt: Dealt) -> Any:
            few = few_rows(dealt, collectives)
            alone = Replica(OneReplica(), few.total, few.total, has_all_rows=True)
            return self._called(gathered(few.batch, collectives), alone, 0 if rows_differ else None)

        ours = self._attempt(of_own_rows, batch)
        return ours, self.first(self._attempt(of_all_rows, batch))

    def first(self, values: Any) -> Any:
        """The values of this process's first replica."""
        return tf.nest.map_structure(lambda value: self._strategy.local(value)[0], values)

    def agree(self, problem: str) -> None:
        """Raises `NeedsAllRowsError` on every process if one of them has a problem; empty for none."""
        everyone = self._strategy.group.gather(f"first batch/{next(_numbers)}", problem, TRACING_SECONDS)
        if found := next((each for each in everyone if each), ""):
            raise NeedsAllRowsError(found)

    def _called(self, batch: Any, replica: Replica, first_row: int | tf.Tensor | None) -> Any:
        with using(replica.collectives), keras_internals.neutral(first_row), keras_internals.functions_inlined():
            return self._code(batch, replica)

    def _attempt(self, replica_function: Callable[[Dealt], Any], batch: Any) -> Any:
        function = tf.function(lambda dealt: self._strategy.run(replica_function, dealt), autograph=False)
        found, problem = None, ""
        try:
            with keras_internals.variables_restored(function.get_concrete_function(batch)):
                found = function(batch)
        except InputError:
            raise
        except tf.errors.InvalidArgumentError as error:
            problem = f"{type(error).__name__}: {one_line(error.message)}"
        except (ValueError, TypeError) as error:
            problem = f"{type(error).__name__}: {one_line(str(error))}"
        self.agree(problem)
        return found
