"""One step as two replica functions, and the compiled loop around them.

`compute` is everything up to the reduced gradients and the loss that all replicas agree on; `apply` changes weights and
slots. A loss or a gradient that is not finite therefore touches neither, and the loop around them stops there: the step
named is the true one. No collective and no update stands inside a condition of a replica function, where tf.distribute
forbids them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals, loss, randomness
from tfdist.collectives import OneReplica
from tfdist.errors import InputError
from tfdist.gradients import Reducer
from tfdist.strategy import HasCollectives

_log = logging.getLogger(__name__)


class Computed(NamedTuple):
    """What `compute` gives to `apply` and to the loop, on each replica.

    Attributes:
      gradients: whole ones, equal on every replica.
      state: the reducer's new state, to be kept if the step counts.
      loss: scalar; the global batch's, equal on every replica.
      finite: scalar bool; whether the loss and every gradient are, the same on every replica.
      norm: scalar; the gradients' global norm where it was asked for, else 0.
      busy: scalar float64; seconds from the batch's arrival to this replica's own gradients.
    """

    gradients: list[tf.Tensor]
    state: list[tf.Tensor]
    loss: tf.Tensor
    finite: tf.Tensor
    norm: tf.Tensor
    busy: tf.Tensor


class Step:
    """The two halves of a step of one model, as replica functions of one strategy."""

    def __init__(
        self,
        model: keras.Model,
        strategy: HasCollectives,
        reducer: Reducer,
        *,
        batch_size: int,
        seed: int,
        jit_compile: bool,
    ):
        """Args: model: compiled and built under the strategy's scope; see `Trainer` for the others."""
        self._model = model
        self._strategy = strategy
        self._collectives = strategy.collectives
        self._reducer = reducer
        self._batch_size = batch_size
        self._seed = seed
        self._jit_compile = jit_compile
        self._variables = list(model.trainable_variables)
        self._seeds = randomness.seed_states(model)
        self._without_gradient: list[frozenset[int]] = []
        specs = [tf.TensorSpec(v.shape, v.dtype, v.path) for v in self._variables]
        self._state = strategy.allocate(reducer.state([*specs, tf.TensorSpec([], keras.config.floatx(), "loss")]))

    def compute(self, batch: Any, step: tf.Tensor, with_norm: tf.Tensor) -> Computed:
        """Forward, backward, reduction. A replica function.

        Args:
          batch: this replica's rows, (x, y) or (x, y, sample_weight).
          step: scalar int64; updates done so far.
          with_norm: scalar bool; whether the global norm is wanted, which costs a pass over the gradients.
        """
        arrived = _now(batch)
        randomness.reseed(self._seeds, self._seed, step, self._collectives.rank)
        gradients, value, outputs = self._local_gradients()(batch)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        keras_internals.update_metrics(self._model, y, outputs, weight)
        busy = _now(gradients) - arrived
        state = [tf.convert_to_tensor(variable) for variable in self._state]
        reduced, state = self._reducer.reduce([*gradients, value], state, self._collectives, name="gradients")
        norm = tf.cond(with_norm, lambda: tf.linalg.global_norm(reduced[:-1]), lambda: tf.zeros([], reduced[0].dtype))
        # A ReLU turns NaN into 0, so the loss alone does not tell. A sum shows an inf or a NaN anywhere, in one pass.
        finite = tf.reduce_all(tf.stack([tf.math.is_finite(tf.reduce_sum(tensor)) for tensor in reduced]))
        return Computed(reduced[:-1], state, reduced[-1], finite, norm, busy)

    def apply(self, gradients: Sequence[tf.Tensor], state: Sequence[tf.Tensor], unused: frozenset[int]) -> None:
        """Weights, slots and the reducer's state. A replica function.

        Args:
          gradients: whole ones, in the order of the trainable variables.
          state: the reducer's.
          unused: indices of the variables that no replica has a gradient for; they are left alone.
        """
        used = [i for i in range(len(gradients)) if i not in unused]
        variables = [self._variables[i] for i in used]
        self._strategy.apply(self._model.optimizer, [gradients[i] for i in used], variables)
        for variable, value in zip(self._state, state, strict=True):
            variable.assign(value)

    def unused(self) -> frozenset[int]:
        """The variables that no replica of the job has a gradient for; called when `compute` has been traced."""
        mine = frozenset.intersection(*self._without_gradient) if self._without_gradient else frozenset()
        everyone = self._strategy.group.gather("step/without_gradient", sorted(mine))
        unused = frozenset.intersection(*(frozenset(indices) for indices in everyone))
        if unused:
            names = ", ".join(self._variables[i].path for i in sorted(unused))
            _log.warning("The loss does not depend on these variables; they are left alone: %s", names)
        return unused

    def _local_gradients(self) -> Callable[[Any], tuple[list[tf.Tensor], tf.Tensor, Any]]:
        if not self._jit_compile:
            return self._differentiate
        compiled = tf.function(self._differentiate, jit_compile=True, autograph=False)

        def without_communication(batch: Any) -> Any:
            try:
                return compiled(batch)
            except (RuntimeError, tf.errors.OpError) as error:
                raise InputError(
                    "--jit_compile needs a forward and backward pass that XLA compiles and that does not communicate "
                    f"(synchronized BatchNorm and masked losses do). Received: {str(error).splitlines()[0]}"
                ) from error

        return compiled if isinstance(self._collectives, OneReplica) else without_communication

    def _differentiate(self, batch: Any) -> tuple[list[tf.Tensor], tf.Tensor, Any]:
        values = [variable.value for variable in self._variables]
        gradients, value, outputs = self._strategy.gradients(self._loss, values, batch)
        self._without_gradient.append(frozenset(i for i, g in enumerate(gradients) if g is None))
        return [_dense(g, v) for g, v in zip(gradients, values, strict=True)], value, outputs

    def _loss(self, batch: Any) -> tuple[tf.Tensor, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        outputs = self._model(x, training=True)
        parts = loss.terms(self._model, y, outputs, weight)
        rows = tf.shape(keras.tree.flatten(x)[0])[0]
        return loss.training_loss(self._model, parts, rows, self._batch_size, self._collectives), outputs


class Result(NamedTuple):
    """What one call of the compiled loop did.

    Attributes:
      losses: [done], the global loss of each step.
      norm: scalar; the global gradient norm of the last step.
      finite: scalar bool; whether every step's loss and gradients were; the call stops after one that is not.
      gradient_finite: [variables], whether each variable's gradient was finite at the last step.
      waited: scalar float64; seconds that this process waited for data.
      busy: [local replicas] float64; seconds that each computed until it had its own gradients.
    """

    losses: tf.Tensor
    norm: tf.Tensor
    finite: tf.Tensor
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
            waited = _now(_first_local(strategy, batch)) - started
            number = first_step + tf.cast(done, tf.int64)
            last = tf.equal(done, steps - 1)
            computed = strategy.run(step.compute, batch, number, tf.logical_and(with_norm, last))
            value, norm = (tf.cast(strategy.local(x)[0], dtype) for x in (computed.loss, computed.norm))
            finite = strategy.local(computed.finite)[0]
            unused = step.unused()

            def update() -> tf.Tensor:
                strategy.run(lambda g, s: step.apply(g, s, unused), computed.gradients, computed.state)
                return tf.ones([len(computed.gradients)], tf.bool)

            def diagnose() -> tf.Tensor:
                first = [strategy.local(g)[0] for g in computed.gradients]
                return tf.stack([tf.reduce_all(tf.math.is_finite(g)) for g in first])

            good = tf.cond(finite, update, diagnose)
            busy = tf.stack(strategy.local(computed.busy))
            losses = so_far.losses.write(done, value)
            return done + 1, Result(losses, norm, finite, good, so_far.waited + waited, so_far.busy + busy)

        start = Result(
            losses=tf.TensorArray(dtype, size=0, dynamic_size=True, element_shape=[]),
            norm=tf.zeros([], dtype),
            finite=tf.constant(True),
            gradient_finite=tf.ones([len(step._variables)], tf.bool),
            waited=tf.zeros([], tf.float64),
            busy=tf.zeros([len(strategy.local_replicas)], tf.float64),
        )
        _, end = tf.while_loop(
            lambda done, so_far: tf.logical_and(done < steps, so_far.finite),
            body,
            (tf.constant(0), start),
            parallel_iterations=1,
        )
        return end._replace(losses=end.losses.stack())

    return loop


def _dense(gradient: tf.Tensor | tf.IndexedSlices | None, variable: tf.Variable) -> tf.Tensor:
    """A gradient as every replica can send it: zeros where there is none, rows of an embedding at their places."""
    if gradient is None:
        return tf.zeros(variable.shape, variable.dtype)
    return tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)


def _now(after: Any) -> tf.Tensor:
    """The time, in seconds, when all tensors of a structure are there."""
    with tf.control_dependencies([x for x in tf.nest.flatten(after) if tf.is_tensor(x)]):
        return tf.timestamp()


def _first_local(strategy: HasCollectives, batch: Any) -> list[tf.Tensor]:
    return [strategy.local(part)[0] for part in tf.nest.flatten(batch)]
