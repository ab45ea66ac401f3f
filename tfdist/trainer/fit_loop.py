"""The fit loop: calls of the compiled loop and what happens between them, e.g. records, evaluations and callbacks."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.checkpoint.callback_state import CallbackStates
from tfdist.checkpoint.manager import Saving
from tfdist.coordination.watchdog import Watchdog
from tfdist.data import Examples, Pipeline, steps_in_epochs
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.diagnostics import Inspection, Site, advice
from tfdist.distribution.strategy import HasCollectives
from tfdist.errors import InputError
from tfdist.process.progress_file import ProgressFile
from tfdist.reporting import NullLedger, NullProfile, Reporter, RunPlan, StepTimer
from tfdist.reporting.memory import peak_memory
from tfdist.reporting.timing import over_ranks
from tfdist.step import metrics
from tfdist.step.callbacks import Callbacks, validation_logs
from tfdist.step.compiled_steps import Steps
from tfdist.step.data_mismatch import must_fit
from tfdist.step.loop import Result, not_finite
from tfdist.step.running_metrics import Progress, RunningMetrics

TIMING_DEADLINE_SECONDS = 3600.0

_log = logging.getLogger(__name__)


class Trains(Protocol):
    """The interface of a trainer that a run depends on.

    Attributes:
      model: compiled and built model.
      strategy: strategy on which it is trained.
      step: number of updates done so far; advanced by the run.
      progress: running metrics since the last record and in the current epoch; updated by the run.
      seed: seed of the order of examples.
      metrics: metrics of the model that are recorded.
      drain: see `tfdist.step.metrics.make_drain`.
      average_statistics: see `tfdist.step.metrics.make_average_statistics`.
      loss_scale: current loss scale; None without loss scaling.
      steps: compiled training loops and trial steps.
      callback_states: state of the callbacks, which the run registers with it.
    """

    model: keras.Model
    strategy: HasCollectives
    step: int
    progress: Progress
    seed: int
    metrics: metrics.ModelMetrics
    drain: Callable[[], list[np.ndarray]]
    average_statistics: Callable[[], None]
    steps: Steps
    callback_states: CallbackStates

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None without loss scaling."""

    def evaluate(self, data: Any, *, batch_size: int) -> dict[str, float]:
        """Returns the loss and the metrics over a whole data set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a run ends and what happens between its steps; all values are numbers of updates.

    Attributes:
      steps: step at which the run ends.
      log_every: steps between records of metrics, at least 1.
      eval_every: steps between evaluations; 0 to evaluate at the end of each epoch.
      steps_per_call: maximum number of steps per call of the compiled loop, at least 1.
    """

    steps: int
    log_every: int = 10
    eval_every: int = 0
    steps_per_call: int = 10

    def __post_init__(self) -> None:
        """Validates the values."""
        least = {"log_every": 1, "eval_every": 0, "steps_per_call": 1}
        for name, value in least.items():
            given = getattr(self, name)
            if not isinstance(given, int) or given < value:
                raise InputError(f"{name} must be an integer of at least {value}. Received: {given!r}.")

    def until(self, step: int, borders: Sequence[int]) -> int:
        """Returns the number of steps for the call that starts at `step`.

        Args:
          step: updates done so far.
          borders: further steps at which a call has to end.

        Returns:
          The number of steps, at most `steps_per_call`, up to the next record, evaluation, border or the end of the
          run.
        """
        periods = [period for period in (self.log_every, self.eval_every) if period]
        nexts = [step - step % period + period for period in periods] + [border for border in borders if border > step]
        return min(self.steps_per_call, min([self.steps, *nexts]) - step)


class History:
    """The records of a run, in the schema of metrics.jsonl.

    Attributes:
      records: all records, in the order in which they were written.
    """

    def __init__(self) -> None:
        """Creates an empty history."""
        self.records: list[dict[str, Any]] = []

    def last(self, kind: str) -> dict[str, Any]:
        """Returns the last record of a kind.

        Args:
          kind: "train" or "eval".

        Raises:
          KeyError: there is no such record.
        """
        for record in reversed(self.records):
            if record["kind"] == kind:
                return record
        raise KeyError(f"No record of kind {kind!r}. Received kinds: {sorted({r['kind'] for r in self.records})}.")


class Run:
    """A single call of `Trainer.fit`."""

    def __init__(
        self,
        trainer: Trains,
        source: Examples,
        test: Examples | None,
        batch_schedule: BatchSchedule,
        schedule: Schedule,
        callbacks: Sequence[keras.callbacks.Callback],
        reporter: Reporter,
        profile: NullProfile,
        inspections: Callable[[Site], Sequence[Inspection]],
        saving: Saving,
        ledger: NullLedger,
        watchdog: Watchdog,
    ):
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._model = trainer.model
        self._source = source
        self._test = test
        self._batch_schedule, self._position = batch_schedule, batch_schedule.position
        self._batch_size = batch_size = batch_schedule.position.batch_size
        self._schedule = schedule
        self._reporter = reporter
        self._profile = profile
        self._saving = saving
        self._ledger = ledger
        self._watchdog = watchdog
        self._note = ProgressFile()
        self._callbacks = Callbacks(
            callbacks,
            self._model,
            self._strategy,
            epochs=-(-self._position.before(schedule.steps) // source.size),
            steps=steps_in_epochs(1, source.size, batch_size),
            verbose=0,
        )
        self._history = History()
        self._timer = StepTimer(batch_size=batch_size)
        self._inspections = inspections(Site(trainer.steps, batch_size, self._batch))
        self._inspected: dict[str, float] = {}
        self._advised = False

    def go(self) -> History:
        """Trains until the end of the schedule, or until a callback stops the run."""
        trainer = self._trainer
        if self._batch_schedule.rate != 1 and self._strategy.is_chief:
            _log.info("%s", self._batch_schedule)
        first = self._position.before(trainer.step)
        pipeline = Pipeline(self._source, self._batch_size, trainer.seed, first)
        plan = RunPlan(
            total_steps=self._schedule.steps,
            batch_size=self._batch_size,
            examples_per_epoch=self._source.size,
            first_step=trainer.step,
            examples_before=first,
        )
        iterator = self._strategy.distribute(pipeline.numbered)
        self._iterator = iterator
        self._reporter.start(plan)
        self._note.note(trainer.step)
        trainer.drain()  # discards what earlier calls of the model added to its layers' metrics
        trainer.callback_states.start(self._callbacks.callbacks, self._model.optimizer)
        self._callbacks.on_train_begin()
        trainer.callback_states.train_begun()
        over = self._was_stopped()
        with contextlib.closing(self._profile), contextlib.closing(self._note):
            # A resumed run that had reached its last step within an epoch still has to end that epoch.
            while not over and (trainer.step < self._schedule.steps or trainer.progress.epoch):
                over = self._one_epoch()
        del self._iterator, iterator  # stops the prefetching threads now rather than at interpreter exit
        self._callbacks.on_train_end(self._history.records[-1] if self._history.records else {})
        trainer.average_statistics()
        return self._history

    def _was_stopped(self) -> bool:
        """Returns whether the resumed run was already over. Any one process may know; all have to agree."""
        states = self._trainer.callback_states
        if not states.resumes:
            return False
        self._model.stop_training = states.is_over
        over = self._callbacks.stopped(self._trainer.step)
        if over and self._strategy.is_chief:
            _log.info("EarlyStopping has stopped this run at step %d: it is over.", self._trainer.step)
        return over

    def _one_epoch(self) -> bool:
        """Trains until the end of the epoch or of the run; returns whether to stop."""
        trainer = self._trainer
        epoch = self._position.epoch(trainer.step, self._source.size)
        whole = self._position.end_of_epoch(epoch, self._source.size)
        end = min(self._schedule.steps, whole)
        self._callbacks.on_epoch_begin(epoch)
        trainer.callback_states.epoch_begun(again=bool(trainer.progress.epoch))
        stopped = False
        while trainer.step < end and not stopped:
            stopped = self._one_call(end)
            # The end of an epoch is saved after its callbacks, below: a resumed run does not repeat them.
            if trainer.step < whole:
                self._saving.at(trainer.step, is_last=stopped or trainer.step == self._schedule.steps)
        logs, trainer.progress.epoch = trainer.progress.epoch.results(trainer.metrics), RunningMetrics()
        if self._test is not None and not self._schedule.eval_every:
            logs |= validation_logs(self._evaluate())
        trainer.average_statistics()
        self._callbacks.on_epoch_end(epoch, logs)
        stopped = self._stopped()
        if trainer.step == whole:
            self._saving.at(trainer.step, is_last=stopped or trainer.step == self._schedule.steps)
        return stopped

    def _one_call(self, epoch_end: int) -> bool:
        trainer, schedule = self._trainer, self._schedule
        self._inspect()
        looks = [i.next(trainer.step + 1) for i in self._inspections] + [self._saving.next(trainer.step)]
        borders = [step for step in looks if step is not None]
        count = schedule.until(trainer.step, [epoch_end, *self._profile.boundaries, *borders])
        self._profile.at(trainer.step)
        log = (trainer.step + count) % schedule.log_every == 0 or trainer.step + count == schedule.steps
        self._callbacks.on_train_batch_begin(trainer.step)
        self._saving.begin(trainer.step + count)
        self._watchdog.begin(trainer.step, trainer.step + count)
        with self._timer.call(count), must_fit(self._source.element_spec), _naming(trainer.step):
            result = trainer.steps.loop(self._batch_size, rate=self._batch_schedule.rate)(
                self._iterator, tf.constant(trainer.step, tf.int64), tf.constant(count), tf.constant(log)
            )
            losses, counted = result.losses.numpy(), result.counted.numpy()
        self._timer.inside(float(result.waited), float(result.busy.numpy().max()))
        if not bool(result.may_go_on):
            self._end_not_finite(result, losses, counted)
        self._ledger.write(trainer.step, count, result.numbers.numpy())
        trainer.step += count
        self._note.note(trainer.step)
        trainer.progress.add(losses, counted, trainer.drain())
        logs = trainer.progress.epoch.results(trainer.metrics)
        self._reporter.progress(trainer.step, logs | self._timer.fields() | trainer.steps.cost | self._inspected)
        if log:
            self._record(result)
        # Not earlier: to write a record, the ranks wait for each other.
        self._watchdog.reached(trainer.step)
        self._callbacks.on_train_batch_end(trainer.step - 1, logs)
        # Before the evaluation, in which the watchdog would not notice a missing rank.
        stopped = self._stopped()
        if self._test is not None and schedule.eval_every and trainer.step % schedule.eval_every == 0:
            self._evaluate()
        return stopped

    def _stopped(self) -> bool:
        """Returns whether a callback of any rank requests a stop; the watchdog covers the wait for the other ranks."""
        step = self._trainer.step
        self._watchdog.begin(step, step)
        stopped = self._callbacks.stopped(step)
        self._watchdog.reached(step)
        return stopped

    def _inspect(self) -> None:
        for inspection in self._inspections:
            if inspection.next(self._trainer.step) == self._trainer.step:
                self._inspected |= inspection.look(self._trainer.step)

    def _batch(self, step: int) -> Any:
        """Returns a batch like that of a step, from a separate iterator.

        It comes from the first epoch, so that a stream has few examples to skip.
        """
        number = step % steps_in_epochs(1, self._source.size, self._batch_size)
        pipeline = Pipeline(self._source, self._batch_size, self._trainer.seed, number * self._batch_size)
        return next(self._strategy.distribute(pipeline.dataset))

    def _advise(self, record: dict[str, Any]) -> None:
        found = None if self._advised else advice(record, self._trainer.steps.compresses)
        if found and self._strategy.is_chief:
            _log.info("%s", found)
        self._advised = self._advised or found is not None

    def _record(self, result: Result) -> None:
        everyone = self._strategy.group.gather("timing", self._timer.own_seconds, TIMING_DEADLINE_SECONDS)
        record = {
            **self._header("train"),
            **self._trainer.progress.window.results(self._trainer.metrics),
            "learning_rate": self._batch_schedule.rate * keras_internals.last_learning_rate(self._model.optimizer),
            **self._timer.window(),
            **over_ranks(everyone),
            "gradient_norm": float(result.norm),
            **self._scaling(),
            **self._trainer.steps.cost,
            **self._inspected,
            **peak_memory(),
        }
        self._trainer.progress.window = RunningMetrics()
        self._tell(record)
        self._advise(record)

    def _scaling(self) -> dict[str, float]:
        scale = self._trainer.loss_scale
        return {} if scale is None else {"loss_scale": scale, "skipped_steps": self._trainer.progress.window.skipped}

    def _evaluate(self) -> dict[str, float]:
        results = self._trainer.evaluate(self._test, batch_size=self._batch_size)
        self._tell({**self._header("eval"), **results})
        return results

    def _header(self, kind: str) -> dict[str, Any]:
        seen = self._position.before(self._trainer.step) / self._source.size
        return {"schema": 1, "kind": kind, "step": self._trainer.step, "epoch": seen, "time": time.time()}

    def _tell(self, record: dict[str, Any]) -> None:
        self._history.records.append(record)
        self._reporter.record(record)

    def _end_not_finite(self, result: Result, losses: np.ndarray, counted: np.ndarray) -> NoReturn:
        step = self._trainer.step + len(losses) - 1
        self._trainer.step = step
        self._trainer.progress.add(losses[:-1], counted[:-1], self._trainer.drain())
        raise not_finite(step, losses[-1], result, self._model.trainable_variables, self._trainer.loss_scale)


@contextlib.contextmanager
def _naming(step: int) -> Iterator[None]:
    """Adds the step as a note to any exception, for error reports."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This was in a call of the compiled loop that began with step {step}.")
        raise
