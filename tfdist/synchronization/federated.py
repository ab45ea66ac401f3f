"""Federated averaging: steps are rounds, after which all replicas have the global weights; see `FedAvg`."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Recording
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.config.sync import FedAvg, Sync
from tfdist.data import Examples
from tfdist.data.client_examples import ClientExamples, ReplicaTurn
from tfdist.distribution.strategy import State, Strategy
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, Sum
from tfdist.step import randomness
from tfdist.step.compiled_loop import Loop, LoopReport, LoopResult, MakeLoop, compile_loop, run_loop, timed_batch
from tfdist.step.compiled_steps import Steps
from tfdist.step.gradient_source import GradientSource, LocalGradients
from tfdist.step.metrics import ModelMetrics
from tfdist.step.reduction import Computed, Reduction, global_norm, run_if
from tfdist.step.settings import Settings, named_specs
from tfdist.step.side_effects import assign
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step
from tfdist.step.validation import inner_optimizer
from tfdist.synchronization.exchange import GlobalWeights, InitialState
from tfdist.synchronization.interface import WeightSynchronizer


class Counts(NamedTuple):
    """Scalars of a replica in a round, float64.

    Attributes:
      examples: sum of the numbers of examples of its clients.
      rows: rows on which they have trained.
      loss: sum over these rows of the loss.
      not_finite: number of batches whose loss or gradients were not finite; after the first, the replica stops.
    """

    examples: tf.Variable
    rows: tf.Variable
    loss: tf.Variable
    not_finite: tf.Variable


class Round(NamedTuple):
    """The reduced results of a round, equal on all replicas, except `reducer_state`.

    Attributes:
      change: for each weight, the mean over clients of x - w_k.
      statistics: for each moving statistic and integer of a layer, its mean over clients.
      reducer_state: the reducer's new state.
      loss: scalar of dtype floatx; mean over all rows; NaN if a client's was not finite.
      finite: scalar bool; whether everything was finite.
      norm: scalar of dtype floatx; norm of `change`.
    """

    change: list[tf.Tensor]
    statistics: list[tf.Tensor]
    reducer_state: list[tf.Tensor]
    loss: tf.Tensor
    finite: tf.Tensor
    norm: tf.Tensor


class RoundState:
    """Variables of one model's rounds, and their exchange; the methods are called in replica functions.

    Between rounds, all replicas have the global weights and an optimizer without state, so that none of this is saved.
    Memory on each replica: three variables per trainable variable, with that of `GlobalWeights`, and two per moving
    statistic.

    Attributes:
      weights: trainable variables of the model.
      global_weights: the global weights.
      changes: for each weight, the sum over a replica's clients of n_k (x - w_k).
      statistics: moving statistics of the model, such as those of BatchNormalization, and integer and bool variables of
        its layers, such as counters.
      statistics_sums: for each of them, the sum over a replica's clients of n_k times its value, or, of an integer, times
        its change, which is exact.
      counts: scalars.
      recording: the calls of the latest trace that send changes.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, reduction: Reduction, outer: str):
        """Creates the variables; `outer`: the outer optimizer, see `GlobalWeights`."""
        self._strategy, self._reduction = strategy, reduction
        self.recording: Recording | None = None
        self._optimizer = inner_optimizer(model.optimizer)
        self._slots = keras_internals.slots(self._optimizer)
        self._initial_slots = InitialState(self._optimizer)
        self.weights = list(model.trainable_variables)
        self.statistics = [*keras_internals.moving_statistics(model), *randomness.counters(model)]
        self.global_weights = GlobalWeights(model.trainable_variables, strategy, outer)
        self.changes = strategy.allocate(_states("change", self.weights))
        self.statistics_sums = strategy.allocate(_states("sum", self.statistics, integers=tf.float64))
        self._initial_statistics = strategy.allocate(_states("start", self.statistics))
        counts = [State(f"round/{name}", (), tf.float64, per_replica=True) for name in Counts._fields]
        self.counts = Counts(*strategy.allocate(counts))

    def begin_round(self) -> None:
        """Resets the sums; all replicas have the global weights and statistics."""
        for total in (*self.changes, *self.statistics_sums, *self.counts):
            total.assign(tf.zeros(total.shape, total.dtype))
        assign(self._initial_statistics, [statistic.value for statistic in self.statistics])

    def begin_client(self) -> None:
        """Assigns the global weights and statistics, and resets the optimizer."""
        self._assign_weights(self.global_weights.values(), 0)
        self._assign_statistics(self._initial_statistics)

    def end_client(self, examples: tf.Tensor) -> None:
        """Adds the changes of a client with this number of examples."""
        for total, x, w in zip(self.changes, self.global_weights.values(), self.weights, strict=True):
            total.assign_add(tf.cast(examples, total.dtype) * (x - tf.convert_to_tensor(w.value)))
        of_client = zip(self.statistics_sums, self.statistics, self._initial_statistics, strict=True)
        for total, statistic, initial in of_client:
            value = tf.cast(tf.convert_to_tensor(statistic.value), total.dtype)
            if not initial.dtype.is_floating:
                value -= tf.cast(tf.convert_to_tensor(initial), total.dtype)
            total.assign_add(tf.cast(examples, total.dtype) * value)
        self.counts.examples.assign_add(tf.cast(examples, tf.float64))

    def _means(self, of_sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the statistics whose `statistics_sums` over all replicas have these means; integers are rounded."""
        pairs = zip(of_sums, self._initial_statistics, strict=True)
        return [mean if initial.dtype.is_floating else _changed(initial, mean) for mean, initial in pairs]

    def reduce(self, examples: float) -> Round:
        """Reduces the sums of all replicas.

        Args:
          examples: expected examples of a replica in a round: changes are sent relative to them, so that they keep their
            size, which lossy dtypes may need.
        """
        floatx = keras.config.floatx()
        self.recording = Recording(self._strategy.step_collectives)
        changes = _relative(self.changes, examples)
        counts = [tf.cast(count, floatx) for count in _relative(self.counts, examples)]
        reduced = self._reduction.reduce([*changes, *counts], self.recording, name="round")
        totals, of_all = reduced.totals[: len(changes)], Counts(*reduced.totals[len(changes) :])
        change = [tf.math.divide_no_nan(total, tf.cast(of_all.examples, total.dtype)) for total in totals]
        sums = _relative(self.statistics_sums, examples)
        if sums:
            sums = Bucketed(Sum()).reduce(sums, [], self.recording, name="round/statistics").totals
        statistics = self._means([total / tf.cast(of_all.examples, total.dtype) for total in sums])
        finite = tf.logical_and(reduced.all_finite(*change, of_all.loss), tf.equal(of_all.not_finite, 0))
        loss = tf.where(finite, tf.math.divide_no_nan(of_all.loss, of_all.rows), float("nan"))
        return Round(change, statistics, reduced.state, loss, finite, tf.cast(global_norm(change), floatx))

    def apply(self, result: Round, number: tf.Tensor) -> None:
        """Updates the global weights and all state; `number`: number of the round."""
        weights = self.global_weights.update(result.change)
        # The number of rounds done becomes the optimizer's number of updates.
        self._assign_weights(weights, number + 1)
        self._assign_statistics(result.statistics)
        self._reduction.assign(result.reducer_state)

    def undo(self, number: tf.Tensor) -> None:
        """Restores the state before the round; `number`: number of the round."""
        self._assign_weights(self.global_weights.values(), number)
        self._assign_statistics(self._initial_statistics)

    def take_over(self) -> None:
        """Assigns the model's weights, which are equal on all replicas, to the global ones."""
        self.global_weights.take_over(self.weights)

    def _assign_statistics(self, values: Sequence[tf.Tensor | tf.Variable]) -> None:
        with self._strategy.own_copies(self.statistics):
            assign(self.statistics, [tf.convert_to_tensor(value) for value in values])

    def _assign_weights(self, values: Sequence[tf.Tensor], updates: tf.Tensor | int) -> None:
        """Assigns weights and a number of updates, and resets the optimizer's state."""
        count = self._optimizer.iterations
        with self._strategy.own_copies([*self.weights, *self._slots, count]):
            assign(self.weights, values)
            assign(self._slots, self._initial_slots.tensors())
            count.assign(tf.cast(updates, count.dtype))


def _changed(initial: tf.Variable, change: tf.Tensor) -> tf.Tensor:
    """Returns an integer or bool value after a change, rounded."""
    value, change = tf.convert_to_tensor(initial), tf.round(change)
    if initial.dtype.is_bool:
        return tf.not_equal(tf.cast(value, change.dtype) + change, 0)
    return value + tf.cast(change, value.dtype)


def _states(name: str, variables: Sequence[keras.Variable], integers: tf.DType | None = None) -> list[State]:
    """Returns a state like each variable; `integers`: dtype of those that are not floating, instead of their own."""
    dtypes = [tf.as_dtype(variable.dtype) for variable in variables]
    dtypes = [dtype if dtype.is_floating or integers is None else integers for dtype in dtypes]
    pairs = zip(variables, dtypes, strict=True)
    return [State(f"round/{name}/{v.path}", tuple(v.shape), dtype, per_replica=True) for v, dtype in pairs]


class ClientGradients(GradientSource):
    """The gradients of a client.

    With the proximal term, the loss is that of FedProx, F_k(w) + mu / 2 |w - x|^2, whose gradient has mu (w - x); losses
    that are recorded are without this term.
    """

    def __init__(self, *args: Any, sync: FedAvg, global_weights: GlobalWeights):
        """Initializes the source; the batch size of the settings is the number of examples of a round."""
        super().__init__(*args, is_local=True)
        self.sync, self._global_weights = sync, global_weights

    def draws(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | int, int]:
        """See base class: the round, and client and batch in the place of a replica."""
        return step[0], tf.cast(step[1], tf.int32), self.sync.clients + 1

    def _of_rows(self, *args: Any) -> LocalGradients:
        """See base class."""
        gradients, value = super()._of_rows(*args)
        if not self.sync.proximal:
            return LocalGradients(gradients, value)
        of_term = [
            tf.constant(self.sync.proximal, x.dtype) * (tf.convert_to_tensor(w.value) - x)
            for w, x in zip(self.variables, self._global_weights.values(), strict=True)
        ]
        return LocalGradients(
            [tf.convert_to_tensor(g) + term for g, term in zip(gradients, of_term, strict=True)], value
        )


def round_specs(weights: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    """Returns names, shapes and dtypes of what an exchange reduces: a change per variable, and the counts."""
    return named_specs(weights, *(f"exchange/{name}" for name in Counts._fields))


def _relative(totals: Sequence[tf.Variable], examples: float) -> list[tf.Tensor]:
    """Returns totals of a replica divided by its expected examples."""
    return [tf.convert_to_tensor(total) / tf.constant(examples, total.dtype) for total in totals]


class RoundLoop:
    """A loop whose steps are rounds."""

    def __init__(self, step: Step, source: ClientGradients, state: RoundState, strategy: Strategy, batch_size: int):
        """Initializes the loop.

        Arguments are a client's step and its gradients, the variables of the rounds, and the expected examples of a round.
        """
        self._step, self._source, self._state, self._strategy = step, source, state, strategy
        self._share = batch_size / strategy.replicas  # expected examples of a replica in a round
        self._is_compared = False

    def run(self, iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_norm: tf.Tensor) -> LoopResult:
        """Runs rounds until the last one, or one that is not finite; see `compile_loop`."""
        # A program or a callback may have assigned weights since the last call.
        self._strategy.run(self._state.take_over)

        def one(done: tf.Tensor, _: Any) -> tuple[list[tf.Tensor], LoopReport]:
            report, [loss, finite, norm] = self._round(iterator, first_step + tf.cast(done, tf.int64))
            return [norm, finite], report._replace(values=[loss, finite, tf.size(report.numbers)])

        floatx = keras.config.floatx()
        specs = [tf.TensorSpec([], dtype) for dtype in (floatx, tf.bool, tf.int32)]
        start = [tf.zeros([], floatx), tf.constant(True)]
        (norm, may_continue), report = run_loop(
            one, start, steps, specs, self._strategy, continues=lambda ending: ending[1]
        )
        losses, counted, sizes = report.values
        return LoopResult(losses, counted, norm, may_continue, (), *report[1:], sizes=sizes)

    def _round(self, iterator: Iterator[Any], number: tf.Tensor) -> tuple[LoopReport, list[tf.Tensor]]:
        """Returns the report of the local steps; loss, finite and norm."""
        strategy, state = self._strategy, self._state
        strategy.run(state.begin_round)
        report = self._local_steps(iterator, number)
        result = strategy.run(state.reduce, self._share)
        if not self._is_compared:  # processes make their first trace together
            assert state.recording is not None
            agree_on_plan(strategy.peers, state.recording.calls)
            self._is_compared = True
        loss, finite, norm = (strategy.local(value)[0] for value in (result.loss, result.finite, result.norm))
        run_if(finite, lambda: strategy.run(state.apply, result, number), lambda: strategy.run(state.undo, number))
        return report, [loss, finite, norm]

    def _local_steps(self, iterator: Iterator[Any], number: tf.Tensor) -> LoopReport:
        """Trains all clients of a round; every process makes as many steps as its iterator says."""
        strategy = self._strategy

        def one(_: tf.Tensor, __: tf.Tensor) -> tuple[tf.Tensor, LoopReport]:
            started, turn, numbers = timed_batch(iterator, strategy)
            assert isinstance(turn, ReplicaTurn)
            with _at_update(self._step.optimizer, number):
                computed = strategy.run(self._train, turn, number)
            waited, busy = strategy.local(computed.arrived)[0] - started, tf.stack(strategy.local(computed.busy))
            return tf.logical_not(strategy.local(turn.is_last)[0]), LoopReport([], waited, busy, numbers)

        _, report = run_loop(one, tf.constant(True), tf.int32.max, [], strategy, continues=lambda has_more: has_more)
        return report

    def _train(self, turn: ReplicaTurn, number: tf.Tensor) -> Computed:
        """Computes and applies one step of a client. A replica function, without communication.

        Args:
          turn: the client's batch; if no row of it counts, nothing changes.
          number: scalar int64; number of the round.
        """
        state, counts = self._state, self._state.counts
        run_if(turn.begins, state.begin_client)
        draw = tf.stack([number, turn.client + self._source.sync.clients * turn.number])
        computed = self._step.compute(turn.batch, draw, tf.constant(False))
        active = tf.logical_and(turn.rows > 0, tf.equal(tf.convert_to_tensor(counts.not_finite), 0))

        def count() -> None:
            rows = tf.cast(turn.rows, tf.float64)
            counts.rows.assign_add(rows)
            counts.loss.assign_add(tf.cast(computed.loss, tf.float64) * rows)

        self._step.apply_if(tf.logical_and(active, computed.finite), computed, count)
        failed = tf.logical_and(active, tf.logical_not(computed.finite))
        counts.not_finite.assign_add(tf.cast(failed, tf.float64))
        run_if(turn.ends, lambda: state.end_client(turn.client_examples))
        return computed


@contextlib.contextmanager
def _at_update(optimizer: keras.Optimizer, number: tf.Tensor) -> Iterator[None]:
    """Context in which updates are traced with the schedule's learning rate and momentum at this number of updates.

    The optimizer's own count is that of the client's steps, which Adam's correction of bias needs.
    """
    schedule = keras_internals.scheduled_learning_rate(optimizer)
    rate = keras_internals.replaced_learning_rate(optimizer, lambda _: schedule(number)) if schedule else None
    with rate or contextlib.nullcontext(), keras_internals.scheduled_momentum(optimizer, number):
        yield


class FederatedSynchronizer(WeightSynchronizer):
    """Replaces steps by rounds, each of which exchanges weights; between rounds, replicas agree."""

    def __init__(self, sync: FedAvg, model: keras.Model, strategy: Strategy, reduction: Reduction):
        self._sync, self._model, self._strategy = sync, model, strategy
        self._state = RoundState(model, strategy, reduction, sync.outer)
        self.variables = self._state.global_weights.optimizer_variables

    def loop(self, steps: Steps, batch_size: int | None, rate: float, step: int, make: MakeLoop = compile_loop) -> Loop:
        """See base class."""
        assert batch_size  # that of a client

        def create(settings: Settings, store: StateStore, metrics: ModelMetrics) -> tuple[Step, Loop]:
            settings = dataclasses.replace(settings, batch_size=batch_size)
            options = self._model, self._strategy, store, settings, metrics
            source = ClientGradients(*options, sync=self._sync, global_weights=self._state.global_weights)
            step = Step(source, Sum(), store)
            loop = RoundLoop(step, source, self._state, self._strategy, batch_size)
            return step, tf.function(loop.run, autograph=False, reduce_retracing=True)

        return steps.custom_loop(("rounds", batch_size), create)

    @property
    def payload_per_step(self) -> float:
        """See base class; the payload of a round."""
        return self._state.recording.payload_bytes if self._state.recording else 0


def check_loss_scale(settings: Settings) -> None:
    """Raises `InputError` for a loss scale, which is state that lasts from step to step, of clients."""
    if settings.sync.trains_clients and settings.loss_scale is not None:
        raise InputError(
            "Clients start each round anew, without state of earlier steps. Received: "
            f"sync={settings.sync} and a loss scale. Use mixed_bfloat16 or float32."
        )


def owned_by_clients(sync: Sync, examples: Examples, batch_size: int, seed: int) -> Examples:
    """Returns the training examples as the clients of a method own them; unchanged for a method without clients.

    Raises:
      InputError: the examples cannot be divided among clients.
    """
    if not isinstance(sync, FedAvg) or isinstance(examples, ClientExamples):
        return examples
    return ClientExamples(examples, sync, batch_size, seed)


def examples_per_step(sync: Sync, size: int, batch_size: int, replicas: int) -> int:
    """Returns `Sync.examples_per_step`.

    Raises:
      InputError: there are more replicas than examples in a round.
    """
    examples = sync.examples_per_step(size, batch_size)
    if sync.trains_clients and examples < replicas:
        raise InputError(
            "A round must have an example for each replica. Received: "
            f"sync={sync}, {size} examples and {replicas} replicas. Use a larger fraction, or fewer replicas."
        )
    return examples
