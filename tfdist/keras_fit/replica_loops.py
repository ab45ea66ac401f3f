"""Compiled loops around a replica function that communicates, updates variables and returns nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.distribution.strategy import HasCollectives

ReplicaFunction = Callable[[Any, tf.Tensor], None]  # (`ReplicaRows`, number of the step, scalar int64) -> None


def repeated(
    strategy: HasCollectives, function: ReplicaFunction, traced: Callable[[], None]
) -> Callable[[Iterator[Any], int, int], None]:
    """Returns a function (rows, first step, steps) that runs a replica function for several batches in one call.

    Args:
      strategy: strategy on which it runs.
      function: runs on each replica.
      traced: called once the function is first traced, by all processes together, before it runs.
    """
    if not strategy.compiles_loops:
        run_once = once(strategy, function, traced)
        return lambda rows, first_step, steps: one_at_a_time(run_once, rows, steps, first_step)
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


def once(strategy: HasCollectives, function: ReplicaFunction, traced: Callable[[], None]) -> Callable[[Any, int], None]:
    """Same as `repeated`, for one batch in memory; returns a function (batch, step)."""
    first = _once(traced)

    def run(batch: Any, step: tf.Tensor) -> None:
        strategy.run(function, batch, tf.cast(step, tf.int64))
        first()

    compiled = strategy.compiled(run)
    # DTensor treats a small int64 as a compile-time constant, and recompiles the program whenever it changes.
    return lambda batch, step: compiled(batch, tf.constant(step, tf.uint64))


def one_at_a_time(run: Callable[[Any, int], None], rows: Iterator[Any], steps: int, first_step: int) -> None:
    """Runs steps one by one, through `once`: communicated tensors may have different shapes in each step.

    TensorFlow's collectives between processes do not support that within one call of a compiled function.

    Args:
      run: result of `once`.
      rows: iterator over batches.
      steps: number of steps.
      first_step: number of the first step.

    Raises:
      StopIteration: there are fewer batches than steps.
    """
    for number in range(first_step, first_step + steps):
        run(next(rows), number)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that makes the call on its first call only."""
    calls = iter([call])
    return lambda: next(calls, _nothing)()


def _nothing() -> None:
    """Does nothing, on all later calls."""
