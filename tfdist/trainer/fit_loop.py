"""Runs a call of `fit`: calls the compiled loop, with records, evaluations, callbacks and checkpoints between calls."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint.manager import Saver
from tfdist.cluster.progress_file import ProgressFile
from tfdist.coordination.watchdog import Watchdog
from tfdist.data import DatasetSplits, Examples, Pipeline, explain_reading_errors, steps_in_epochs
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.data.row_partition import EVEN, RowAllocation
from tfdist.distribution.balanced_parts import describe_parts
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, byte_size, count_of
from tfdist.pipelining.has_stages import pipeline_of
from tfdist.pipelining.staged_model import full_model, pipeline_without_flush
from tfdist.reporting import RunPlan
from tfdist.reporting.timing import StepTimer
from tfdist.reporting.warn_once import warn_once
from tfdist.step import running_metrics
from tfdist.step.compiled_loop import LoopResult, not_finite_error
from tfdist.step.data_check import explain_mismatch
from tfdist.step.row_dependence import log_dependence
from tfdist.step.running_metrics import RunningMetrics
from tfdist.step.settings import Settings
from tfdist.trainer.auto_all_reduce import AutoAllReduce
from tfdist.trainer.auto_compression import AutoCompression
from tfdist.trainer.balancing import FixedRowAllocator
from tfdist.trainer.callbacks import Callbacks, run_evaluation
from tfdist.trainer.data_warnings import check_examples, locate_nonfinite
from tfdist.trainer.fit_arguments import FitArguments
from tfdist.trainer.inspections import Inspection, RunView
from tfdist.trainer.options import FitOptions
from tfdist.trainer.pipeline_timeline import ExposedCommunication, PipelineTimeline
from tfdist.trainer.program import Program
from tfdist.trainer.records import History, Recorder
from tfdist.trainer.replica_divergence import CompressionErrorMonitor, ReplicaDivergence
from tfdist.trainer.run_warnings import warn_about_run
from tfdist.trainer.train_state import TrainState

_MAX_LISTED = 8  # maximum number of replicas for which the number of rows is listed


def describe(
    program: Program, data: DatasetSplits, plan: RunPlan, strategy_reason: str = "", allocation: RowAllocation = EVEN
) -> dict[str, str]:
    """Returns descriptions of a run by name, such as its model, data, strategy, batch and length."""
    model, strategy, settings = program.model, program.strategy, program.settings
    batch = _describe_batch(strategy, settings, plan.batch_size, model.dtype_policy.name, allocation)
    return {
        "model": describe_model(model),
        "data": describe_data(data),
        "strategy": describe_strategy(strategy),
        "servers": strategy.remote.description if strategy.remote else "",
        "stages": strategy.parts.description(model),
        "optimizer": describe_optimizer(model, strategy),
        "chosen": strategy_reason,
        "batch": data.train.batch_text or batch,
        "sync": str(settings.sync) if settings.sync.exchanges_weights else "",
        "length": _describe_length(plan),
    }


def describe_model(model: keras.Model) -> str:
    """Returns a description such as `mlp, 55,050 parameters (215.0 KiB)`."""
    model = full_model(model)
    count, trainable_count = _parameter_count(model.weights), _parameter_count(model.trainable_weights)
    sizes = [tf.as_dtype(keras.backend.standardize_dtype(v.dtype)).size for v in model.weights]
    size = sum(_parameter_count([v]) * n for v, n in zip(model.weights, sizes, strict=True))
    frozen = "" if trainable_count == count else f", {trainable_count:,} of them trainable"
    return f"{model.name}, {count:,} parameters ({byte_size(size)}){frozen}"


def describe_data(data: DatasetSplits) -> str:
    """Returns a description such as `digits, 1,437 examples of 8x8x1, 10 classes; 360 to evaluate`."""
    name = "" if data.name == "data" else f"{data.name}, "  # arrays have no name
    classes = f", {data.classes} classes" if data.classes else ""
    test = f"; {_example_count(data.test):,} to evaluate" if data.test is not None else "; nothing to evaluate"
    return f"{name}{_example_count(data.train):,} examples of {_describe_shape(data.train.element_spec)}{classes}{test}"


def describe_strategy(strategy: Strategy) -> str:
    """Returns a description such as `horovod, 2 replicas on 2 GPU devices in 2 processes`."""
    device_types = {device.device_type for device in tf.config.list_logical_devices()}
    device_type = next((device_type for device_type in ("TPU", "GPU") if device_type in device_types), "CPU")
    processes = f" in {strategy.cluster.size} processes" if strategy.cluster.size > 1 else ""
    devices = count_of(strategy.total_devices, f"{device_type} device")
    return f"{strategy.name}, {count_of(strategy.replicas, 'replica')} on {devices}{processes}"


def describe_optimizer(model: keras.Model, strategy: Strategy) -> str:
    """Returns a description such as `state sharded over 2 replicas, 215.0 KiB + 214.1 KiB`; empty if it is not sharded."""
    parts = strategy.optimizer_shards.state_bytes(model.optimizer)
    if len(parts) == 1:
        return ""
    return f"state sharded over {len(parts)} replicas, {describe_parts(parts)}"


def _describe_batch(
    strategy: Strategy, settings: Settings, batch_size: int, precision: str, allocation: RowAllocation = EVEN
) -> str:
    """Returns a description such as `64 examples = 2 replicas x 2 micro-steps x 16, computed in float32`."""
    parts, micro_steps = strategy.batch_parts, strategy.micro_batches or settings.micro_steps
    name = "micro-batches" if strategy.micro_batches else "micro-steps"
    counts = None if allocation is EVEN else allocation.counts(batch_size, strategy.replicas)
    if counts and min(counts) < max(counts):
        summands = " + ".join(map(str, counts))
        rows = summands if len(counts) <= _MAX_LISTED else f"{min(counts)} to {max(counts)} for each replica"
        split = f" = {rows}" + (f", in {micro_steps} micro-steps" if micro_steps > 1 else "")
    elif batch_size % (parts * micro_steps):
        split = f", divided over {parts} replicas" + (f" and {micro_steps} micro-steps" if micro_steps > 1 else "")
    else:
        factors = [(parts, "replicas" if parts == strategy.replicas else "parts"), (micro_steps, name)]
        factor_texts = [f"{count} {factor} x " for count, factor in factors if count > 1]
        split = f" = {''.join(factor_texts)}{batch_size // (parts * micro_steps)}" if factor_texts else ""
    if strategy.remote and strategy.remote.whole_batches:
        split = " for one worker" + (f", in {micro_steps} micro-steps" if micro_steps > 1 else "")
    return f"{count_of(batch_size, 'example')}{split}, computed in {precision}"


def _describe_length(plan: RunPlan) -> str:
    """Returns a description such as `450 steps, 20 epochs`, or `100 steps, 4.45 epochs; 50 steps completed before`."""
    epochs = (plan.epoch(plan.total_steps) or 0.0) - plan.first_epoch
    number = int(plan.epoch_text(plan.total_steps).rpartition("/")[2] or 0)
    epochs_text = count_of(number, "epoch") if epochs >= number else f"{epochs:.3g} epochs"
    previous_text = f"; {count_of(plan.first_step, 'step')} completed before" if plan.first_step else ""
    return f"{count_of(plan.total_steps, 'step')}, {epochs_text}{previous_text}"


def _example_count(examples: Examples) -> int:
    return min(examples.size, examples.rows or examples.size)


def _describe_shape(spec: Any) -> str:
    inputs = spec[0] if isinstance(spec, tuple | list) else spec
    shapes = ["x".join("?" if n is None else str(n) for n in leaf.shape) or "1" for leaf in tf.nest.flatten(inputs)]
    return ", ".join(shapes[:3]) + (", ..." if len(shapes) > 3 else "")


def _parameter_count(variables: Any) -> int:
    return sum(int(np.prod(variable.shape)) for variable in variables)


_log = logging.getLogger(__name__)


class FitLoop:
    """A call of `Trainer.fit`, which owns the `TrainState` until the call ends."""

    def __init__(
        self,
        program: Program,
        state: TrainState,
        arguments: FitArguments,
        batches: BatchSchedule,
        callbacks: Sequence[keras.callbacks.Callback],
        options: FitOptions,
        saver: Saver,
        row_allocator: FixedRowAllocator,
        watchdog: Watchdog,
    ):
        """Prepares the loop; every process must create it."""
        self._program, self._strategy, self._model = program, program.strategy, program.model
        self._state = state
        self._data = data = arguments.data
        self._source, self._test = data.train, data.test
        self._batches, self._position = batches, batches.position
        self._batch_size = batch_size = batches.position.batch_size
        self._end = end = batches.end(arguments.steps, arguments.epochs, self._source.size)
        self._schedule, self._arguments, reporting = options.schedule, arguments, options.reporting
        self._first_epoch = batches.epochs_from // self._source.size
        self._reporting, self._saver, self._watchdog = reporting, saver, watchdog
        self._row_allocator = row_allocator
        self._progress_file = ProgressFile()
        self._callbacks = Callbacks(
            callbacks,
            self._model,
            self._strategy,
            epochs=self._epoch_number(self._position.epoch(end - 1, self._source.size) + 1),
            steps=steps_in_epochs(1, self._source.size, batch_size),
            verbose=0,
        )
        self._timer = StepTimer(batch_size=batch_size)
        self._recorder = Recorder(program, state, batches, self._source.size, self._timer, reporting.reporter)
        self._inspections = self._create_inspections(options)
        self._inspection_fields: dict[str, float] = {}
        self._epoch_logs: dict[str, float] = {}

    def _create_inspections(self, options: FitOptions) -> list[Inspection]:
        """Returns the inspections of a run, the same on every process."""
        checks, reporting, steps = options.checks, options.reporting, self._program.steps
        run_view = RunView(steps, self._batch_size, self._batch)
        choice, sums_gradients = steps.compression.choice, steps.sums_gradients
        enabled_inspections: list[Inspection] = []
        if steps.needs_all_reduce_table:
            enabled_inspections.append(AutoAllReduce(run_view, reporting.record_all_reduce_table))
        if choice and sums_gradients:
            enabled_inspections.append(AutoCompression(run_view, choice))
        if checks.compression_check_every and sums_gradients:
            limits = checks.compression_check_every, checks.compression_max_error
            enabled_inspections.append(CompressionErrorMonitor(run_view, *limits))
        # The probe steps of this inspection would flush the pipeline.
        if checks.measure_every and sums_gradients and not pipeline_without_flush(self._strategy):
            enabled_inspections.append(ExposedCommunication(run_view, checks.measure_every))
        if checks.check_sync_every:

            def replicated_variables() -> Mapping[str, tf.Variable]:
                return self._program.run_variables(self._state.callbacks).replicated_variables()

            enabled_inspections.append(ReplicaDivergence(run_view, checks.check_sync_every, replicated_variables))
        if reporting.profile.boundaries and (pipeline := pipeline_of(self._strategy)):
            first = min(reporting.profile.boundaries)
            enabled_inspections.append(PipelineTimeline(run_view, pipeline, first, reporting.record_timelines))
        return enabled_inspections

    def run(self) -> History:
        """Trains until the end of the run, or until a callback stops it."""
        state, history = self._state, self._recorder.history
        if self._batches.learning_rate_factor != 1 and self._strategy.is_chief:
            _log.info("%s", self._batches)
        program = self._program
        data_warnings = self._reporting.findings
        if data_warnings is None:
            options = program.settings, program.dependence
            data_warnings = check_examples(self._strategy, self._model, self._source, self._test, *options)
        if program.metrics.replicas_see_all_rows:
            reason, plan = program.dependence.reasons[0], program.dependence.communication
            log_dependence(self._model, "A step", reason, plan, self._strategy)
        eval_every, seed = self._schedule.eval_every, program.settings.seed
        warn_about_run(program, self._data, self._batches, state.step, self._end, eval_every, data_warnings)
        first = self._position.examples_before(state.step)
        skip_count = first if self._source.is_reiterable else first - state.examples_read
        pipeline = Pipeline(self._source, self._batch_size, seed, skip_count, self._row_allocator.allocation)
        iterator = self._program.synchronizer.batches(pipeline, self._strategy)
        self._iterator = iterator
        self._reporting.reporter.start(self._plan(first))
        self._progress_file.note(state.step)
        self._program.steps.end = self._end
        self._program.read_and_reset_metrics()  # discards the values of earlier calls in metrics of layers
        state.callbacks.start(self._callbacks.of_process, self._model.optimizer)
        self._callbacks.on_train_begin()
        state.callbacks.after_train_begin()
        # After the callbacks, which may have assigned weights or a learning rate.
        self._program.synchronizer.begin(state.step, self._batch_size)
        is_over = self._is_already_stopped()
        with (
            contextlib.closing(self._reporting.profile),
            contextlib.closing(self._progress_file),
            self._program.synchronizer.training(),
        ):
            # A resumed run that had reached its last step within an epoch must still end that epoch.
            while not is_over and (state.step < self._end or state.progress.epoch):
                with explain_reading_errors(self._source):
                    is_over = self._run_epoch()
            # After the last save, because a longer run that resumes from this step would not evaluate here.
            period, end = self._schedule.eval_every, self._end
            if self._test is not None and period and state.step == end and end % period:
                if end // period > self._batches.begun_at // period:
                    self._evaluate()
        del self._iterator, iterator  # stops the prefetching threads
        self._callbacks.on_train_end(self._epoch_logs)
        self._log_reasons()
        self._program.average_statistics(self._state.step)
        return history

    def _plan(self, examples_before: int) -> RunPlan:
        plan = RunPlan(
            total_steps=self._end,
            batch_size=self._batch_size,
            examples_per_epoch=self._source.size,
            first_step=self._state.step,
            examples_before=examples_before,
            first_epoch=self._first_epoch - self._arguments.initial_epoch,
            shows_communication=not self._strategy.trains_whole_model
            or (self._strategy.replicas > 1 and bool(self._program.steps.compressed_names())),
        )
        rows: dict[str, str] = {}
        if not self._program.steps.has_loop:  # only the first call of `fit` describes the run
            allocation = self._row_allocator.allocation_at(self._state.step)
            rows = describe(self._program, self._data, plan, self._reporting.strategy_reason, allocation)
        return dataclasses.replace(plan, description={**rows, **self._reporting.description})

    def _is_already_stopped(self) -> bool:
        """Returns whether the resumed run had already been stopped; the same on all processes."""
        callbacks = self._state.callbacks
        if not callbacks.resumes:
            return False
        self._model.stop_training = callbacks.is_over
        is_stopped = self._callbacks.should_stop(self._state.step)
        if is_stopped and self._strategy.is_chief:
            text = "This run was already stopped by EarlyStopping at step %d: there is nothing left to train."
            _log.info(text, self._state.step)
        return is_stopped

    def _run_epoch(self) -> bool:
        """Trains until the end of the epoch or of the run; returns whether to stop training."""
        state = self._state
        stream_epoch = self._position.epoch(state.step, self._source.size)
        epoch = self._epoch_number(stream_epoch)
        epoch_end = self._position.end_of_epoch(stream_epoch, self._source.size)
        end = min(self._end, epoch_end)
        self._callbacks.on_epoch_begin(epoch)
        state.callbacks.after_epoch_begin(is_resumed=bool(state.progress.epoch))
        should_stop = False
        while state.step < end and not should_stop:
            should_stop = self._run_call(end)
            # The end of an epoch is saved after its callbacks, below, so that a resumed run does not repeat them.
            if state.step < epoch_end:
                self._saver.save_if_due(state.step, is_last=should_stop or state.step == self._end)
        logs, state.progress.epoch = state.progress.epoch.results(self._program.metrics), RunningMetrics()
        self._saver.observe(state.step, logs)
        if self._test is not None and not self._schedule.eval_every and self._arguments.validates(epoch):
            logs |= self._evaluate()
        self._program.average_statistics(self._state.step)
        self._epoch_logs = logs
        self._recorder.history.end_epoch(epoch, self._callbacks.on_epoch_end(epoch, logs))
        should_stop = self._should_stop()
        if state.step == epoch_end:
            self._saver.save_if_due(state.step, is_last=should_stop or state.step == self._end)
        return should_stop

    def _epoch_number(self, stream_epoch: int) -> int:
        """Converts the index of an epoch in the stream of examples to the index that callbacks receive."""
        return stream_epoch - self._first_epoch + self._arguments.initial_epoch

    def _run_call(self, epoch_end: int) -> bool:
        state, first_step = self._state, self._state.step
        self._inspect()
        count = self._next_call_steps(epoch_end)
        should_log = (first_step + count) % self._schedule.log_every == 0 or first_step + count == self._end
        self._reporting.profile.on_step(first_step)
        self._callbacks.on_train_batch_begin(first_step)
        self._saver.begin(first_step + count)
        self._watchdog.begin(first_step, first_step + count)
        result = self._train(count, should_log)
        self._progress_file.note(state.step)
        logs = state.progress.epoch.results(self._program.metrics)
        fields = self._timer.fields() | self._program.cost | self._inspection_fields
        self._reporting.reporter.progress(state.step, logs | fields)
        if should_log:
            self._recorder.train(float(result.norm), self._inspection_fields)
        self._row_allocator.observe_call(state.step, count, result.compute_seconds.numpy())
        # After the record and the allocation of rows, in which ranks wait for each other.
        self._watchdog.end_call(state.step)
        self._callbacks.on_train_batch_end(state.step - 1, logs)
        # Before the evaluation, in which the watchdog does not detect a missing rank.
        should_stop = self._should_stop()
        if self._test is not None and self._schedule.eval_every and state.step % self._schedule.eval_every == 0:
            self._evaluate()
            should_stop = self._should_stop()
        return should_stop

    def _next_call_steps(self, epoch_end: int) -> int:
        step = self._state.step
        next_steps = [inspection.next_step(step + 1) for inspection in self._inspections]
        next_steps += [self._saver.next_step(step), self._program.synchronizer.next_step(step)]
        next_steps.append(self._row_allocator.next_change(step))
        boundaries = [next_step for next_step in next_steps if next_step is not None]
        return self._schedule.call_steps(step, self._end, [epoch_end, *self._reporting.profile.boundaries, *boundaries])

    def _train(self, count: int, needs_norm: bool) -> LoopResult:
        """Runs steps and adds their results to the state; raises `NotFiniteError` if the run cannot continue."""
        state = self._state
        is_compiled = self._program.steps.has_loop
        with (
            contextlib.nullcontext() if is_compiled else self._reporting.reporter.busy("compiling the training step"),
            self._timer.call(count),
            explain_mismatch(self._source.element_spec),
            _annotate_errors(state.step, self._position.examples_before(state.step)),
        ):
            self._program.metrics.restore_kept(state.progress.epoch.sums, self._strategy)
            options = self._program.steps, self._batch_size, self._batches.learning_rate_factor, state.step
            loop = self._program.synchronizer.loop(*options)
            numbers = tf.constant(state.step, tf.int64), tf.constant(count), tf.constant(needs_norm)
            result = loop(self._iterator, *numbers)
            losses, is_counted = result.losses.numpy(), result.is_finite.numpy()
            if bool(result.may_continue):
                self._inspection_fields |= self._program.exchange(state.step + count)
        self._timer.add_inner_times(float(result.wait_seconds), float(result.compute_seconds.numpy().max()))
        if not bool(result.may_continue):
            self._raise_not_finite(result, losses, is_counted)
        self._warn_about_skipped_steps(np.asarray(result.skipped), count)
        for entry in result.example_ranges(state.step):
            self._reporting.ledger.write(*entry)
        self._reporting.ledger.write_updates(result.updates)
        state.step += count
        state.progress.add(losses, is_counted, self._program.read_and_reset_metrics(), self._program.metrics.kept)
        initial = state.progress.divergence.add(losses[is_counted], self._batch_size)
        if initial is not None and self._strategy.is_chief:
            warn_once(running_metrics.describe(state.step, float(losses[-1]), initial))
        return result

    def _warn_about_skipped_steps(self, skipped_counts: np.ndarray, count: int) -> None:
        if not skipped_counts.any() or not self._strategy.is_chief:
            return
        text = ", ".join(f"replica {i} skipped {number}" for i, number in enumerate(skipped_counts) if number)
        warn_once(
            f"Because of overflow, {text} of the {count} steps from step {self._state.step} on, unlike the other replicas. "
            "Each replica has its own loss scale.",
            "replicas skip different steps",
        )

    def _raise_not_finite(self, result: LoopResult, losses: np.ndarray, is_counted: np.ndarray) -> NoReturn:
        state, program = self._state, self._program
        state.step += len(losses) - 1
        state.progress.add(losses[:-1], is_counted[:-1], program.read_and_reset_metrics(), program.metrics.kept)
        first, variables = self._position.examples_before(state.step), self._model.trainable_variables
        locations = locate_nonfinite(self._source, self._batch_size, program.settings.seed, first)
        raise not_finite_error(state.step, losses[-1], result, variables, program.store.loss_scale, locations)

    def _should_stop(self) -> bool:
        """Returns whether a callback of any rank requests a stop; the watchdog monitors the wait for other ranks."""
        step = self._state.step
        self._watchdog.begin(step, step)
        should_stop = self._callbacks.should_stop(step)
        self._watchdog.end_call(step)
        return should_stop

    def _log_reasons(self) -> None:
        reasons = [getattr(callback, "reason", "") for callback in self._callbacks.of_process]
        for reason in reasons if self._strategy.is_chief else []:
            if not isinstance(reason, str) or not reason:  # an unrelated attribute of a user's callback
                continue
            _log.info("%s%s.", reason[0].upper(), reason[1:])

    def _inspect(self) -> None:
        for inspection in self._inspections:
            if inspection.next_step(self._state.step) == self._state.step:
                self._inspection_fields |= inspection.inspect(self._state.step)

    def _batch(self, step: int) -> Any:
        """Returns a batch like that of a step; reads it in the first epoch of a new iterator, to skip few examples."""
        number = step % steps_in_epochs(1, self._source.size, self._batch_size)
        seed = self._program.settings.seed
        allocation = self._row_allocator.allocation_at(step)
        pipeline = Pipeline(self._source.sample, self._batch_size, seed, number * self._batch_size, allocation)
        return next(self._strategy.distribute(pipeline.dataset))

    def _evaluate(self) -> dict[str, float]:
        assert self._test is not None
        step, size = self._state.step, self._arguments.validation_batch_size
        evaluate = functools.partial(self._program.evaluate, self._test, size, step)
        results = run_evaluation(self._callbacks, steps_in_epochs(1, self._test.size, size), evaluate)
        self._recorder.evaluation(results)
        logs = {f"val_{name}": value for name, value in results.items()}  # as callbacks monitor them
        self._callbacks.on_evaluation(step, logs)
        self._saver.observe(step, logs)
        return logs


@contextlib.contextmanager
def _annotate_errors(step: int, examples: int) -> Iterator[None]:
    """Context that adds the step as a note to exceptions, and explains a premature end of the data."""
    try:
        yield
    except tf.errors.FailedPreconditionError as error:
        if "expected to contain an infinite number" not in str(error):
            raise
        raise InputError(
            f"The data must last as long as the run. Received: data that ended in the steps after {examples} examples. "
            "Reduce `epochs` or `steps_per_epoch`, or pass data that repeats."
        ) from error
    except Exception as error:
        error.add_note(f"The error occurred in a call of the compiled loop that began with step {step}.")
        raise
