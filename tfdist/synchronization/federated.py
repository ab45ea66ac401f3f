"""Federated averaging: each step is a round, after which all replicas have the global weights; see `FedAvg`."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import RecordingCollectives
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.config.sync import FedAvg, Sync
from tfdist.data import Examples
from tfdist.data.client_examples import ClientBatch, ClientExamples
from tfdist.distribution.strategy import State, Strategy
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, Sum
from tfdist.step import randomness
from tfdist.step.compiled_loop import Loop, LoopReport, LoopResult, MakeLoop, compile_loop, run_loop, timed_batch
from tfdist.step.compiled_steps import Steps
from tfdist.step.gradient_source import GradientSource, LocalGradients
from tfdist.step.layer_state import assign
from tfdist.step.metrics import ModelMetrics
from tfdist.step.reduction import ComputeResult, Reduction, global_norm, run_if
from tfdist.step.settings import Settings, named_specs
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step
from tfdist.step.validation import inner_optimizer
from tfdist.synchronization.interface import WeightSynchronizer
from tfdist.synchronization.weight_averaging import CreateReducer, GlobalWeights, initial_slot_function


class Counts(NamedTuple):
    """The counts of a replica in a round, scalars of dtype float64."""

    examples: tf.Variable  # number of examples of its clients
    rows: tf.Variable  # rows on which its clients have trained
    loss: tf.Variable  # sum of the loss over these rows
    # Number of batches whose loss or gradients were not finite; the replica stops after the first.
    not_finite: tf.Variable


class RoundResult(NamedTuple):
    """The reduced results of a round, equal on all replicas, except `reducer_state`."""

    change: list[tf.Tensor]  # for each weight, the mean over clients of x - w_k
    statistics: list[tf.Tensor]  # for each moving statistic and integer of a layer, its mean over clients
    reducer_state: list[tf.Tensor]  # the reducer's new state
    loss: tf.Tensor  # scalar of dtype floatx; mean over all rows; NaN if a client's loss was not finite
    finite: tf.Tensor  # scalar bool; whether all losses and changes were finite
    norm: tf.Tensor  # scalar of dtype floatx; norm of `change`


class RoundState:
    """The variables of a model's rounds, and their exchange. Its methods are called in replica functions.

    Between rounds, all replicas have the global weights and an optimizer without state, so none of this is saved. Memory
    on each replica: three variables per trainable variable, including `GlobalWeights`, and two per moving statistic.

    Attributes:
      changes: for each weight, the sum over a replica's clients of n_k (x - w_k).
      statistics: moving statistics of the model, such as those of BatchNormalization, and integer and bool variables of
        its layers, such as counters.
      statistics_sums: for each of `statistics`, the sum over a replica's clients of n_k times its value, or for integers, of
        n_k times its change, which is exact.
      recording: the collective calls of the latest trace.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, reduction: Reduction, outer: str):
        self._strategy, self._reduction = strategy, reduction
        self.recording: RecordingCollectives | None = None
        self._optimizer = inner_optimizer(model.optimizer)
        self._slots = keras_internals.slots(self._optimizer)
        self._initial_slots = initial_slot_function(self._optimizer)
        self.weights = list(model.trainable_variables)
        self.statistics = [*keras_internals.moving_statistics(model), *randomness.integer_state(model)]
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

    def reset(self, updates: tf.Tensor | int = 0) -> None:
        """Assigns the global weights and statistics, and resets the optimizer, with this number of updates."""
        self._assign(self.global_weights.values(), self._initial_statistics, updates)

    def end_client(self, examples: tf.Tensor) -> None:
        """Adds the changes of a client with this number of examples."""
        for total, x, w in zip(self.changes, self.global_weights.values(), self.weights, strict=True):
            total.assign_add(tf.cast(examples, total.dtype) * (x - tf.convert_to_tensor(w.value)))
        triples = zip(self.statistics_sums, self.statistics, self._initial_statistics, strict=True)
        for total, statistic, initial in triples:
            value = tf.cast(tf.convert_to_tensor(statistic.value), total.dtype)
            if not initial.dtype.is_floating:
                value -= tf.cast(tf.convert_to_tensor(initial), total.dtype)
            total.assign_add(tf.cast(examples, total.dtype) * value)
        self.counts.examples.assign_add(tf.cast(examples, tf.float64))

    def _new_statistics(self, means: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the new statistics, given the means of `statistics_sums` over clients; integers are rounded."""
        pairs = zip(means, self._initial_statistics, strict=True)
        return [mean if initial.dtype.is_floating else _add_change(initial, mean) for mean, initial in pairs]

    def reduce(self, examples: float) -> RoundResult:
        """Reduces the sums of all replicas, divided by the expected examples of a replica in a round.

        This preserves the magnitude of changes for lossy dtypes.
        """
        floatx = keras.config.floatx()
        self.recording = RecordingCollectives(self._strategy.step_collectives)
        changes = _divide_by_examples(self.changes, examples)
        counts = [tf.cast(count, floatx) for count in _divide_by_examples(self.counts, examples)]
        reduction = self._reduction.reduce([*changes, *counts], self.recording, name="round")
        totals, all_counts = reduction.totals[: len(changes)], Counts(*reduction.totals[len(changes) :])
        change = [tf.math.divide_no_nan(total, tf.cast(all_counts.examples, total.dtype)) for total in totals]
        sums = _divide_by_examples(self.statistics_sums, examples)
        if sums:
            sums = Bucketed(Sum()).reduce(sums, [], self.recording, name="round/statistics").totals
        statistics = self._new_statistics([total / tf.cast(all_counts.examples, total.dtype) for total in sums])
        is_finite = tf.logical_and(reduction.all_finite(*change, all_counts.loss), tf.equal(all_counts.not_finite, 0))
        loss = tf.where(is_finite, tf.math.divide_no_nan(all_counts.loss, all_counts.rows), float("nan"))
        return RoundResult(change, statistics, reduction.state, loss, is_finite, tf.cast(global_norm(change), floatx))

    def apply(self, result: RoundResult, index: tf.Tensor) -> None:
        """Updates the global weights and all state after the round with this index."""
        weights = self.global_weights.update(result.change)
        # The number of rounds done becomes the optimizer's number of updates.
        self._assign(weights, result.statistics, index + 1)
        self._reduction.assign(result.reducer_state)

    def _assign(
        self, weights: Sequence[tf.Tensor], statistics: Sequence[tf.Tensor | tf.Variable], updates: tf.Tensor | int
    ) -> None:
        count = self._optimizer.iterations
        variables = [*self.weights, *self._slots, *self.statistics]
        with self._strategy.own_copies([*variables, count]):
            assign(variables, [*weights, *self._initial_slots(), *map(tf.convert_to_tensor, statistics)])
            count.assign(tf.cast(updates, count.dtype))


def _add_change(initial: tf.Variable, change: tf.Tensor) -> tf.Tensor:
    """Returns an integer or bool value after a change, rounded."""
    value, change = tf.convert_to_tensor(initial), tf.round(change)
    if initial.dtype.is_bool:
        return tf.not_equal(tf.cast(value, change.dtype) + change, 0)
    return value + tf.cast(change, value.dtype)


def _states(name: str, variables: Sequence[keras.Variable], integers: tf.DType | None = None) -> list[State]:
    """Returns a state for each variable; `integers` replaces the dtype of variables that are not floating-point."""
    dtypes = [tf.as_dtype(variable.dtype) for variable in variables]
    dtypes = [dtype if dtype.is_floating or integers is None else integers for dtype in dtypes]
    pairs = zip(variables, dtypes, strict=True)
    return [State(f"round/{name}/{v.path}", tuple(v.shape), dtype, per_replica=True) for v, dtype in pairs]


class ClientGradients(GradientSource):
    """The gradients of a client.

    The proximal term of FedProx makes the loss F_k(w) + mu / 2 |w - x|^2, which adds mu (w - x) to the gradient.
    Recorded losses do not include this term.
    """

    def __init__(self, *args: Any, sync: FedAvg, global_weights: GlobalWeights):
        """Initializes the source; `settings.batch_size` is the expected number of examples of a round."""
        super().__init__(*args, is_local=True)
        self.sync, self._global_weights = sync, global_weights

    def random_seed_inputs(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | int, int]:
        """See base class. Returns the round, and an index of client and batch instead of the replica."""
        return step[0], tf.cast(step[1], tf.int32), self.sync.clients + 1

    def _row_gradients(self, *args: Any) -> LocalGradients:
        gradients, value = super()._row_gradients(*args)
        if self.sync.proximal:
            triples = zip(gradients, self.variables, self._global_weights.values(), strict=True)
            gradients = [
                tf.convert_to_tensor(g) + tf.constant(self.sync.proximal, x.dtype) * (tf.convert_to_tensor(w.value) - x)
                for g, w, x in triples
            ]
        return LocalGradients(gradients, value)


def _divide_by_examples(totals: Sequence[tf.Variable], examples: float) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(total) / tf.constant(examples, total.dtype) for total in totals]


class RoundLoop:
    """A loop whose steps are rounds."""

    def __init__(self, step: Step, source: ClientGradients, state: RoundState, strategy: Strategy, batch_size: int):
        """Initializes the loop; `batch_size` is the expected number of examples of a round."""
        self._step, self._source, self._state, self._strategy = step, source, state, strategy
        self._replica_examples = batch_size / strategy.replicas  # expected in a round
        self._plan_checked = False

    def run(
        self, iterator: Iterator[Any], first_step: tf.Tensor, steps: tf.Tensor, with_gradient_norm: tf.Tensor
    ) -> LoopResult:
        """Runs rounds, up to one that is not finite; see `compile_loop`."""
        # A program or a callback may have assigned weights since the last call.
        self._strategy.run(self._state.global_weights.take_weights)

        def run_round(index: tf.Tensor, _: Any) -> tuple[list[tf.Tensor], LoopReport]:
            report, [loss, finite, norm] = self._round(iterator, first_step + tf.cast(index, tf.int64))
            return [norm, finite], report._replace(values=[loss, finite, tf.size(report.example_indices)])

        floatx = keras.config.floatx()
        specs = [tf.TensorSpec([], dtype) for dtype in (floatx, tf.bool, tf.int32)]
        initial_state = [tf.zeros([], floatx), tf.constant(True)]
        (norm, may_continue), report = run_loop(
            run_round, initial_state, steps, specs, self._strategy, continues=lambda state: state[1]
        )
        losses, is_finite, sizes = report.values
        return LoopResult(losses, is_finite, norm, may_continue, (), *report[1:], sizes=sizes)

    def _round(self, iterator: Iterator[Any], index: tf.Tensor) -> tuple[LoopReport, list[tf.Tensor]]:
        """Runs a round; returns the report of the local steps, and loss, finite and norm."""
        strategy, state = self._strategy, self._state
        strategy.run(state.begin_round)
        report = self._local_steps(iterator, index)
        result = strategy.run(state.reduce, self._replica_examples)
        if not self._plan_checked:  # in the first trace, which all processes make together
            assert state.recording is not None
            agree_on_plan(strategy.peers, state.recording.calls)
            self._plan_checked = True
        loss, finite, norm = (strategy.local(value)[0] for value in (result.loss, result.finite, result.norm))
        run_if(finite, lambda: strategy.run(state.apply, result, index), lambda: strategy.run(state.reset, index))
        return report, [loss, finite, norm]

    def _local_steps(self, iterator: Iterator[Any], index: tf.Tensor) -> LoopReport:
        """Trains all clients of a round; the iterator of each process determines its number of steps."""
        strategy = self._strategy

        def run_step(_: tf.Tensor, __: tf.Tensor) -> tuple[tf.Tensor, LoopReport]:
            start_time, batch, example_indices = timed_batch(iterator, strategy)
            assert isinstance(batch, ClientBatch)
            with _schedule_scope(self._step.optimizer, index):
                result = strategy.run(self._train, batch, index)
            wait_seconds = strategy.local(result.arrival_time)[0] - start_time
            compute_seconds = tf.stack(strategy.local(result.compute_seconds))
            report = LoopReport([], wait_seconds, compute_seconds, example_indices)
            return tf.logical_not(strategy.local(batch.ends_round)[0]), report

        _, report = run_loop(
            run_step, tf.constant(True), tf.int32.max, [], strategy, continues=lambda has_more: has_more
        )
        return report

    def _train(self, batch: ClientBatch, index: tf.Tensor) -> ComputeResult:
        """Computes and applies one step of a client if its batch has rows. A replica function that does not communicate."""
        state, counts = self._state, self._state.counts
        run_if(batch.begins_client, state.reset)
        round_and_batch = tf.stack([index, batch.client + self._source.sync.clients * batch.batch_index])
        result = self._step.compute(batch.batch, round_and_batch, tf.constant(False))
        is_active = tf.logical_and(batch.rows > 0, tf.equal(tf.convert_to_tensor(counts.not_finite), 0))

        def count() -> None:
            rows = tf.cast(batch.rows, tf.float64)
            counts.rows.assign_add(rows)
            counts.loss.assign_add(tf.cast(result.loss, tf.float64) * rows)

        self._step.apply_if(tf.logical_and(is_active, result.finite), result, count)
        has_failed = tf.logical_and(is_active, tf.logical_not(result.finite))
        counts.not_finite.assign_add(tf.cast(has_failed, tf.float64))
        run_if(batch.ends_client, lambda: state.end_client(batch.client_examples))
        return result


@contextlib.contextmanager
def _schedule_scope(optimizer: keras.Optimizer, updates: tf.Tensor) -> Iterator[None]:
    """Context in which updates are traced with the schedule's learning rate and momentum after this number of updates.

    The optimizer itself counts the client's steps, as Adam's bias correction requires.
    """
    schedule = keras_internals.scheduled_learning_rate(optimizer)
    rate_context = keras_internals.replace_learning_rate(optimizer, lambda _: schedule(updates)) if schedule else None
    with rate_context or contextlib.nullcontext(), keras_internals.scheduled_momentum(optimizer, updates):
        yield


class FederatedSynchronizer(WeightSynchronizer):
    """Replaces steps with rounds, which exchange weights; between rounds, replicas have equal weights."""

    def __init__(
        self, sync: FedAvg, model: keras.Model, strategy: Strategy, create_reducer: CreateReducer, store: StateStore
    ):
        self._sync, self._model, self._strategy = sync, model, strategy
        specs = named_specs(model.trainable_variables, *(f"exchange/{name}" for name in Counts._fields))
        reduction = Reduction(create_reducer(specs), specs, store, "exchange/")
        self._state = RoundState(model, strategy, reduction, sync.outer)
        self.variables = self._state.global_weights.optimizer_variables

    def loop(
        self, steps: Steps, batch_size: int | None, rate_factor: float, step: int, make: MakeLoop = compile_loop
    ) -> Loop:
        assert batch_size  # the expected number of examples of a round

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
        """See base class. A step is a round."""
        return self._state.recording.payload_bytes if self._state.recording else 0


def check_loss_scale(settings: Settings) -> None:
    """Raises `InputError` for clients with a loss scale, whose state would have to be kept between rounds."""
    if settings.sync.trains_clients and settings.loss_scale is not None:
        raise InputError(
            "Clients start each round without state from earlier rounds. Received: "
            f"sync={settings.sync} and a loss scale. Use mixed_bfloat16 or float32."
        )


def divide_among_clients(sync: Sync, examples: Examples, batch_size: int, seed: int) -> Examples:
    """Divides the training examples among clients; returns them unchanged for a method without clients.

    Raises:
      InputError: the examples cannot be divided among clients.
    """
    if not isinstance(sync, FedAvg) or isinstance(examples, ClientExamples):
        return examples
    return ClientExamples(examples, sync, batch_size, seed)
