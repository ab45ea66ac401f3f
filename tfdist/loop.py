"""The compiled loop around steps: what one call of it does, it does without the host.

A step that is not finite changes neither weights nor slots. Without a loss scale the loop stops there, so that the step
named is the true one; with one it goes on, unless too many in a row were skipped.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.step import Step
from tfdist.strategy import HasCollectives


class Result(NamedTuple):
    """What one call of the compiled loop did.

    Attributes:
      losses: [done], the global loss of each step.
      counted: [done] bool, whether each step was finite, so that it changed the weights.
      norm: scalar; the global gradient norm of the last step.
      may_go_on: scalar bool; False if the run has to end here.
      gradient_finite: [variables], whether each variable's gradient was finite at the last step.
      waited: scalar float64; seconds that this process waited for data.
      busy: [local replicas] float64; seconds that each computed until it had its own gradients.
    """

    losses: tf.Tensor
    counted: tf.Tensor
    norm: tf.Tensor
    may_go_on: tf.Tensor
    gradient_finite: tf.Tensor
    waited: tf.Tensor
    busy: tf.Tensor


def compile_loop(step: Step, strategy: HasCollectives) -> Callable[..., Result]:
    """Returns a compiled function (iterator, first_step int64, steps int32, with_norm bool) -> Result; traced once.

    `with_norm` asks for the gradient's norm at the last step of the call.
    """
    dtype = keras.config.floatx()

    @tf.function(autograph=False, reduce_retracing=True)
    def loop(iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> Result:
        def body(done: tf.Tensor, so_far: Result) -> tuple[tf.Tensor, Result]:
            started = tf.timestamp()
            with tf.control_dependencies([started]):
                batch = next(iterator)
            waited = _after(_first_local(strategy, batch)) - started
            last = tf.equal(done, steps - 1)
            number = first_step + tf.cast(done, tf.int64)
            computed = strategy.run(step.compute, batch, number, tf.logical_and(with_norm, last))
            value, norm = (tf.cast(strategy.local(x)[0], dtype) for x in (computed.loss, computed.norm))
            finite = strategy.local(computed.finite)[0]
            unused = step.unused()

            def update() -> tf.Tensor:
                strategy.run(lambda whole: step.apply(whole, unused), computed)
                return tf.ones([len(step.variables)], tf.bool)

            def skip() -> tf.Tensor:
                strategy.run(step.skip, computed)
                first = [strategy.local(gradient)[0] for gradient in computed.gradients]
                return tf.stack([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in first])

            return done + 1, Result(
                losses=so_far.losses.write(done, value),
                counted=so_far.counted.write(done, finite),
                norm=norm,
                may_go_on=step.may_go_on(computed),
                gradient_finite=tf.cond(finite, update, skip),
                waited=so_far.waited + waited,
                busy=so_far.busy + tf.stack(strategy.local(computed.busy)),
            )

        start = Result(
            losses=tf.TensorArray(dtype, size=0, dynamic_size=True, element_shape=[]),
            counted=tf.TensorArray(tf.bool, size=0, dynamic_size=True, element_shape=[]),
            norm=tf.zeros([], dtype),
            may_go_on=tf.constant(True),
            gradient_finite=tf.ones([len(step.variables)], tf.bool),
            waited=tf.zeros([], tf.float64),
            busy=tf.zeros([len(strategy.local_replicas)], tf.float64),
        )
        _, end = tf.while_loop(
            lambda done, so_far: tf.logical_and(done < steps, so_far.may_go_on),
            body,
            (tf.constant(0), start),
            parallel_iterations=1,
        )
        return end._replace(losses=end.losses.stack(), counted=end.counted.stack())

    return loop


def _after(tensors: list[tf.Tensor]) -> tf.Tensor:
    """The time, in seconds, when all these tensors are there."""
    with tf.control_dependencies(tensors):
        return tf.timestamp()


def _first_local(strategy: HasCollectives, batch: Any) -> list[tf.Tensor]:
    return [strategy.local(part)[0] for part in tf.nest.flatten(batch)]
