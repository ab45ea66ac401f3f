"""The compiled loop of rounds: clients train on the replicas without communication, then the replicas exchange."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.data.client_examples import ReplicaTurn
from tfdist.distribution.strategy import HasCollectives
from tfdist.step.compiled_loop import Loop, LoopResult, taken_apart
from tfdist.synchronization.client_step import ClientStep
from tfdist.synchronization.round_exchange import RoundExchange
from tfdist.synchronization.round_state import RoundState


class _Spent(NamedTuple):
    """What local steps have spent and used so far.

    Attributes:
      count: number of local steps.
      waited: see `LoopResult`.
      busy: see `LoopResult`.
      numbers: array of the indices of the examples.
      rows: their number in this round.
    """

    count: tf.Tensor
    waited: tf.Tensor
    busy: tf.Tensor
    numbers: tf.TensorArray
    rows: tf.Tensor


def compile_round_loop(
    step: ClientStep, state: RoundState, exchange: RoundExchange, strategy: HasCollectives, batch_size: int
) -> Loop:
    """Returns a function as `compile_loop` does, whose steps are rounds.

    Args:
      step: step of a client.
      state: variables of the rounds.
      exchange: exchange at the end of a round.
      strategy: strategy of the replicas.
      batch_size: expected examples of a round.
    """
    loop = _RoundLoop(step, state, exchange, strategy, batch_size / strategy.replicas)
    return tf.function(loop.run, autograph=False, reduce_retracing=True)


class _RoundLoop:
    """The parts of the loop; see `compile_round_loop`."""

    def __init__(
        self, step: ClientStep, state: RoundState, exchange: RoundExchange, strategy: HasCollectives, share: float
    ):
        self._step, self._state, self._exchange, self._strategy = step, state, exchange, strategy
        self._share = share  # expected examples of a replica in a round
        self._is_compared = False

    def run(self, iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        """Makes rounds until the last one, or one that is not finite."""
        # A program or a callback may have assigned weights since the last call.
        self._strategy.run(self._state.take_over)

        def body(done: tf.Tensor, spent: _Spent, result: LoopResult) -> tuple[tf.Tensor, _Spent, LoopResult]:
            spent, [loss, finite, norm] = self._round(iterator, first_step + tf.cast(done, tf.int64), spent)
            found = result._replace(
                losses=result.losses.write(done, loss),
                counted=result.counted.write(done, finite),
                norm=norm,
                may_continue=finite,
                sizes=result.sizes.write(done, spent.rows),
            )
            return done + 1, spent, found

        replicas, variables = len(self._strategy.local_replicas), len(self._step.variables)
        start = (tf.constant(0), _nothing_spent(replicas), _no_result(variables))

        def going(done: tf.Tensor, _: _Spent, result: LoopResult) -> tf.Tensor:
            return tf.logical_and(done < steps, result.may_continue)

        _, spent, end = tf.while_loop(going, body, start, parallel_iterations=1)
        return end._replace(
            losses=end.losses.stack(),
            counted=end.counted.stack(),
            waited=spent.waited,
            busy=spent.busy,
            numbers=spent.numbers.concat(),
            sizes=end.sizes.stack(),
        )

    def _round(self, iterator: Iterator[Any], number: tf.Tensor, spent: _Spent) -> tuple[_Spent, list[tf.Tensor]]:
        """Returns what was spent; loss, finite and norm."""
        strategy, exchange = self._strategy, self._exchange
        strategy.run(self._state.begin_round)
        spent = self._local_steps(iterator, number, spent._replace(rows=tf.constant(0)))
        result = strategy.run(exchange.reduce, self._share)
        if not self._is_compared:  # processes make their first trace together
            assert exchange.recording is not None
            agree_on_plan(strategy.peers, exchange.recording.calls)
            self._is_compared = True
        loss, finite, norm = (strategy.local(value)[0] for value in (result.loss, result.finite, result.norm))

        def applied() -> tf.Tensor:
            strategy.run(exchange.apply, result, number)
            return tf.constant(True)

        def undone() -> tf.Tensor:
            strategy.run(exchange.undo, number)
            return tf.constant(False)

        tf.cond(finite, applied, undone)
        return spent, [loss, finite, norm]

    def _local_steps(self, iterator: Iterator[Any], number: tf.Tensor, spent: _Spent) -> _Spent:
        """Trains all clients of a round; every process makes as many steps as its iterator says."""
        strategy = self._strategy

        def body(going: tf.Tensor, spent: _Spent) -> tuple[tf.Tensor, _Spent]:
            started = tf.timestamp()
            with tf.control_dependencies([started]):
                turn, numbers = taken_apart(next(iterator), strategy)
            assert isinstance(turn, ReplicaTurn)
            with _at_update(self._step.optimizer, number):
                times = strategy.run(self._step.train, turn, number)
            return tf.logical_not(strategy.local(turn.is_last)[0]), _Spent(
                spent.count + 1,
                spent.waited + strategy.local(times.arrived)[0] - started,
                spent.busy + tf.stack(strategy.local(times.busy)),
                spent.numbers.write(spent.count, numbers),
                spent.rows + tf.size(numbers),
            )

        _, found = tf.while_loop(lambda going, _: going, body, (tf.constant(True), spent), parallel_iterations=1)
        return found


@contextlib.contextmanager
def _at_update(optimizer: keras.Optimizer, number: tf.Tensor) -> Iterator[None]:
    """Context in which updates are traced with the schedule's learning rate and momentum at this number of updates.

    The optimizer's own count is that of the client's steps, which Adam's correction of bias needs.
    """
    schedule = keras_internals.scheduled_learning_rate(optimizer)
    rate = keras_internals.replaced_learning_rate(optimizer, lambda _: schedule(number)) if schedule else None
    with rate or contextlib.nullcontext(), keras_internals.scheduled_momentum(optimizer, number):
        yield


def _nothing_spent(local_replicas: int) -> _Spent:
    return _Spent(
        tf.constant(0),
        tf.zeros([], tf.float64),
        tf.zeros([local_replicas], tf.float64),
        tf.TensorArray(tf.int64, size=0, dynamic_size=True, infer_shape=False, element_shape=[None]),
        tf.constant(0),
    )


def _no_result(variables: int) -> LoopResult:
    floatx = keras.config.floatx()
    return LoopResult(
        losses=tf.TensorArray(floatx, size=0, dynamic_size=True, element_shape=[]),
        counted=tf.TensorArray(tf.bool, size=0, dynamic_size=True, element_shape=[]),
        norm=tf.zeros([], floatx),
        may_continue=tf.constant(True),
        gradient_finite=tf.ones([variables], tf.bool),
        waited=tf.zeros([], tf.float64),
        busy=tf.zeros([0], tf.float64),
        numbers=tf.zeros([0], tf.int64),
        skipped=tf.zeros([0], tf.int32),
        sizes=tf.TensorArray(tf.int32, size=0, dynamic_size=True, element_shape=[]),
    )
