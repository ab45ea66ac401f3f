"""Compiled loops around a replica function that communicates, updates variables and returns nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.distribution.strategy import Strategy
from tfdist.keras_fit.batch_readers import BatchReader

ReplicaFunction = Callable[[Any, tf.Tensor], None]  # (`ReplicaRows`, number of the step, scalar int64) -> None


class ReplicaLoops:
    """Runs a replica function for batches."""

    def __init__(self, strategy: Strategy, function: ReplicaFunction, traced: Callable[[], None]):
        """Initializes the loops; compiles nothing yet.

        Args:
          strategy: strategy on which it runs.
          function: runs on each replica.
          traced: called once the function is first traced, by all processes together, before it runs.
        """
        self._once = _once_compiled(strategy, function, traced)
        self._repeated = _repeated(strategy, function, traced) if strategy.compiles_loops else None

    def run(self, batches: Any, most: int, first_step: int, *, one_by_one: bool) -> int:
        """Runs the function for a batch in memory, or for up to `most` batches of a `BatchReader`; returns their number.

        Args:
          batches: a `BatchReader`, or a `ReplicaRows` for `Strategy.run`.
          most: maximum number of batches.
          first_step: number of the first step.
          one_by_one: whether each batch has a call of its own: communicated tensors may have different shapes in each, which
            TensorFlow's collectives between processes do not support within one call of a compiled function.

        Raises:
          StopIteration: there are fewer batches.
        """
        if not isinstance(batches, BatchReader):
            self._once(batches, first_step)
            return 1
        steps = batches.ahead(most)
        if self._repeated is None or one_by_one:
            for number in range(first_step, first_step + steps):
                self._once(next(batches), number)
        else:
            self._repeated(batches.rows, first_step, steps)
            batches.took(steps)
        return steps


def _repeated(
    strategy: Strategy, function: ReplicaFunction, traced: Callable[[], None]
) -> Callable[[Iterator[Any], int, int], None]:
    first = _once(traced)

    def with_its_batch(batch: Any, step: tf.Tensor) -> None:
        # If data ends unexpectedly, no part of the step must have run, not even what does not depend on data.
        with tf.control_dependencies(
            [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]
        ):
            function(batch, step)

    @tf.function(autograph=False, reduce_retracing=True)
    def loop(rows: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor) -> None:
        def body(done: tf.Tensor) -> tf.Tensor:
            strategy.run(with_its_batch, next(rows), first_step + tf.cast(done, tf.int64))
            first()
            return done + 1

        tf.while_loop(lambda done: done < steps, body, (tf.constant(0),), parallel_iterations=1)

    return lambda rows, first_step, steps: loop(rows, tf.constant(first_step, tf.int64), tf.constant(steps))


def _once_compiled(
    strategy: Strategy, function: ReplicaFunction, traced: Callable[[], None]
) -> Callable[[Any, int], None]:
    first = _once(traced)

    def run(batch: Any, step: tf.Tensor) -> None:
        strategy.run(function, batch, tf.cast(step, tf.int64))
        first()

    compiled = strategy.compiled(run)
    # DTensor treats a small int64 as a compile-time constant, and recompiles the program whenever it changes.
    return lambda batch, step: compiled(batch, tf.constant(step, tf.uint64))


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that makes the call on its first call only."""
    calls = iter([call])
    return lambda: next(calls, _nothing)()


def _nothing() -> None:
    """Does nothing, on all later calls."""
