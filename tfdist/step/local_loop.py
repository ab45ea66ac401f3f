"""The compiled loop around steps of replicas that train locally; what they report is merged once per call."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.distribution.strategy import HasCollectives
from tfdist.step.compiled_loop import Loop, LoopResult, taken_apart
from tfdist.step.local_step import LocalSGDStep


class _Progress(NamedTuple):
    """What the loop carries: of each step, loss and rows, and which replicas were not finite and must stop.

    Attributes:
      steps: array of float64 [local replicas, 4].
      norm: scalar; norm of the gradients of this process's first replica.
      waited: scalar float64; seconds that this process waited for data.
      busy: [local replicas] float64; seconds of computation.
      numbers: array of the indices of the examples.
    """

    steps: tf.TensorArray
    norm: tf.Tensor
    waited: tf.Tensor
    busy: tf.Tensor
    numbers: tf.TensorArray


def compile_local_loop(step: LocalSGDStep, strategy: HasCollectives) -> Loop:
    """Returns a function as `compile_loop` does; each replica makes its steps on its own rows, without communication."""
    local = len(strategy.local_replicas)

    @tf.function(autograph=False, reduce_retracing=True)
    def loop(iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        strategy.run(step.begin)

        def body(done: tf.Tensor, so_far: _Progress) -> tuple[tf.Tensor, _Progress]:
            started = tf.timestamp()
            with tf.control_dependencies([started]):
                batch, numbers = taken_apart(next(iterator), strategy)
            wanted = tf.logical_and(with_norm, tf.equal(done, steps - 1))
            made = strategy.run(step.train, batch, first_step + tf.cast(done, tf.int64), wanted)
            found = [
                tf.stack([tf.cast(strategy.local(value)[i], tf.float64) for value in made[:4]]) for i in range(local)
            ]
            return done + 1, _Progress(
                steps=so_far.steps.write(done, tf.stack(found)),
                norm=strategy.local(made.norm)[0],
                waited=so_far.waited + strategy.local(made.arrived)[0] - started,
                busy=so_far.busy + tf.stack(strategy.local(made.busy)),
                numbers=so_far.numbers.write(done, numbers),
            )

        start = _Progress(
            steps=tf.TensorArray(tf.float64, size=0, dynamic_size=True, element_shape=[local, 4]),
            norm=tf.zeros([], keras.config.floatx()),
            waited=tf.zeros([], tf.float64),
            busy=tf.zeros([local], tf.float64),
            numbers=tf.TensorArray(tf.int64, size=0, dynamic_size=True, infer_shape=False, element_shape=[None]),
        )
        _, end = tf.while_loop(lambda done, _: done < steps, body, (tf.constant(0), start), parallel_iterations=1)
        return _merged(end, step, strategy)

    return loop


def _merged(end: _Progress, step: LocalSGDStep, strategy: HasCollectives) -> LoopResult:
    """Merges the reports of all replicas, in one message."""
    losses, rows, finite, may_continue = tf.unstack(end.steps.stack(), axis=-1)  # each [steps, local replicas]
    counted = rows * finite
    losses = tf.where(finite > 0, losses, 0.0)  # the loss of a replica that skips may be NaN
    ranks = tf.one_hot(list(strategy.local_replicas), strategy.replicas, dtype=tf.float64)  # [local, replicas]
    sums = tf.reduce_sum(tf.stack([losses * counted, counted]), axis=-1)
    parts = [sums, tf.transpose((1 - finite) @ ranks), tf.transpose((1 - may_continue) @ ranks)]
    mine = tf.concat(parts, 0) / len(strategy.local_replicas)  # [2 + 2 replicas, steps]
    shared = strategy.run(lambda: strategy.collectives.all_reduce([mine], name="local_loop/reports")[0])
    replicas = strategy.replicas
    total, counted, skipped, stopped = tf.split(strategy.local(shared)[0], [1, 1, replicas, replicas], axis=0)
    total, counted = total[0], counted[0]
    bad = tf.reduce_any(stopped > 0, axis=0)  # [steps]
    done = tf.where(tf.reduce_any(bad), tf.argmax(tf.cast(bad, tf.int32)) + 1, tf.size(bad, tf.int64))
    mean = tf.where(bad | tf.equal(counted, 0), tf.constant(float("nan"), tf.float64), total / counted)
    return LoopResult(
        losses=tf.cast(mean, keras.config.floatx())[:done],
        counted=tf.logical_not(bad | tf.equal(counted, 0))[:done],
        norm=end.norm,
        may_continue=tf.logical_not(tf.reduce_any(bad)),
        gradient_finite=tf.ones([len(step.variables)], tf.bool),
        waited=end.waited,
        busy=end.busy,
        numbers=end.numbers.concat(),
        skipped=tf.cast(tf.reduce_sum(skipped[:, :done], axis=1), tf.int32),
        sizes=tf.zeros([0], tf.int32),
    )
