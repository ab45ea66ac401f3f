"""The compiled loop of rounds: clients train on the replicas without communication, then the replicas exchange."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.data.client_examples import ReplicaTurn
from tfdist.distribution.strategy import Strategy
from tfdist.step.compiled_loop import Loop, LoopReport, LoopResult, run_loop, timed_batch
from tfdist.step.reduction import run_if
from tfdist.synchronization.client_step import ClientStep
from tfdist.synchronization.round_exchange import RoundExchange
from tfdist.synchronization.round_state import RoundState


def compile_round_loop(
    step: ClientStep, state: RoundState, exchange: RoundExchange, strategy: Strategy, batch_size: int
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

    def __init__(self, step: ClientStep, state: RoundState, exchange: RoundExchange, strategy: Strategy, share: float):
        self._step, self._state, self._exchange, self._strategy = step, state, exchange, strategy
        self._share = share  # expected examples of a replica in a round
        self._is_compared = False

    def run(self, iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        """Makes rounds until the last one, or one that is not finite."""
        # A program or a callback may have assigned weights since the last call.
        self._strategy.run(self._state.take_over)

        def one(done: tf.Tensor, _: Any) -> tuple[list[tf.Tensor], LoopReport]:
            report, [loss, finite, norm] = self._round(iterator, first_step + tf.cast(done, tf.int64))
            return [norm, finite], report._replace(values=[loss, finite, tf.size(report.numbers)])

        floatx = keras.config.floatx()
        specs = [tf.TensorSpec([], dtype) for dtype in (floatx, tf.bool, tf.int32)]
        start = [tf.zeros([], floatx), tf.constant(True)]
        (norm, may_continue), report = run_loop(
            one, start, steps, specs, self._strategy, going=lambda ending: ending[1]
        )
        losses, counted, sizes = report.values
        return LoopResult(losses, counted, norm, may_continue, (), *report[1:], sizes=sizes)

    def _round(self, iterator: Iterator[Any], number: tf.Tensor) -> tuple[LoopReport, list[tf.Tensor]]:
        """Returns the report of the local steps; loss, finite and norm."""
        strategy, exchange = self._strategy, self._exchange
        strategy.run(self._state.begin_round)
        report = self._local_steps(iterator, number)
        result = strategy.run(exchange.reduce, self._share)
        if not self._is_compared:  # processes make their first trace together
            assert exchange.recording is not None
            agree_on_plan(strategy.peers, exchange.recording.calls)
            self._is_compared = True
        loss, finite, norm = (strategy.local(value)[0] for value in (result.loss, result.finite, result.norm))
        run_if(
            finite, lambda: strategy.run(exchange.apply, result, number), lambda: strategy.run(exchange.undo, number)
        )
        return report, [loss, finite, norm]

    def _local_steps(self, iterator: Iterator[Any], number: tf.Tensor) -> LoopReport:
        """Trains all clients of a round; every process makes as many steps as its iterator says."""
        strategy = self._strategy

        def one(_: tf.Tensor, __: tf.Tensor) -> tuple[tf.Tensor, LoopReport]:
            started, turn, numbers = timed_batch(iterator, strategy)
            assert isinstance(turn, ReplicaTurn)
            with _at_update(self._step.optimizer, number):
                computed = strategy.run(self._step.train, turn, number)
            waited, busy = strategy.local(computed.arrived)[0] - started, tf.stack(strategy.local(computed.busy))
            return tf.logical_not(strategy.local(turn.is_last)[0]), LoopReport([], waited, busy, numbers)

        _, report = run_loop(one, tf.constant(True), tf.int32.max, [], strategy, going=lambda going: going)
        return report


@contextlib.contextmanager
def _at_update(optimizer: keras.Optimizer, number: tf.Tensor) -> Iterator[None]:
    """Context in which updates are traced with the schedule's learning rate and momentum at this number of updates.

    The optimizer's own count is that of the client's steps, which Adam's correction of bias needs.
    """
    schedule = keras_internals.scheduled_learning_rate(optimizer)
    rate = keras_internals.replaced_learning_rate(optimizer, lambda _: schedule(number)) if schedule else None
    with rate or contextlib.nullcontext(), keras_internals.scheduled_momentum(optimizer, number):
        yield
