"""Records metrics during a run, keeps the history of the run, and detects a slow rank."""

import logging
import numbers
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tfdist import keras_internals
from tfdist.coordination.group import LONG_SECONDS
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.errors import with_argument_names
from tfdist.pipelining.staged_model import staleness
from tfdist.reporting import Reporter
from tfdist.reporting.environment import peak_memory
from tfdist.reporting.timing import StepTimer, compare_ranks, cost_of_slowest
from tfdist.reporting.warn_once import warn_once
from tfdist.step.running_metrics import RunningMetrics
from tfdist.trainer.pipeline_timeline import advice
from tfdist.trainer.program import Program
from tfdist.trainer.train_state import TrainState

# A rank is slow if, over this many records, steps and seconds, its time exceeds the median of the others by this ratio and
# the others wait for it for this fraction of a step. On a busy machine, a process may be slow for a second or two.
_MIN_RATIO, _MIN_COST = 1.25, 0.1
_MIN_RECORDS, _MIN_STEPS, _MIN_SECONDS = 5, 50, 10.0


class SlowRank:
    """Detects a rank that is slow in several consecutive records."""

    def __init__(self) -> None:
        self._records: list[tuple[int, float, float, int, float]] = []  # all of the same rank

    def observe(self, seconds_by_rank: Sequence[float | None], step_seconds: float, step: int) -> str | None:
        """Returns a warning if the same rank has been the slowest in several records, otherwise None.

        `seconds_by_rank` are the seconds per step that each rank needs for its input and gradients, None for ranks without
        a clock, `step_seconds` is the wall time of a step, and `step` is the number of completed updates.
        """
        previous_records, self._records = self._records, []
        cost = cost_of_slowest(seconds_by_rank, step_seconds)
        if cost is None or cost < _MIN_COST:
            return None
        *other_seconds, slowest_seconds = sorted(rank_seconds or 0.0 for rank_seconds in seconds_by_rank)
        ratio, rank = slowest_seconds / max(median(other_seconds), 1e-9), seconds_by_rank.index(slowest_seconds)
        if ratio < _MIN_RATIO:
            return None
        records = [record for record in previous_records if record[0] == rank]
        self._records = records = [*records, (rank, ratio, cost, step, step_seconds)]
        _, ratios, costs, record_steps, times = zip(*records, strict=True)
        steps = step - record_steps[0]
        if len(records) < _MIN_RECORDS or steps < _MIN_STEPS or steps * median(times) < _MIN_SECONDS:
            return None
        return (
            f"Rank {rank} takes {median(ratios):.1f} times as long as the others to load input and compute gradients, and they "
            f"wait for it during {100 * median(costs):.0f}% of each step."
        )


class History:
    """The records of a run, in the schema of metrics.jsonl, and the results of its epochs, as Keras's `fit` returns them.

    Attributes:
      records: all records, in order.
      epoch: indices of the completed epochs, from 0.
      history: the results of these epochs by name of the loss or metric, with the prefix `val_` for validation, and what
        callbacks added to the logs in `on_epoch_end`, such as the learning rate.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}

    def __repr__(self) -> str:
        last = ""
        for name, (*_, value) in self.history.items():  # a callback may add values of any type
            last += f", {name} {value:.4g}" if isinstance(value, numbers.Real) else f", {name} {value!s:.20}"
        return f"<History of epochs {self.epoch[0]} to {self.epoch[-1]}{last}>" if self.epoch else "<History: empty>"

    def end_epoch(self, epoch: int, results: Mapping[str, Any]) -> None:
        """Adds the results of an epoch."""
        self.epoch.append(epoch)
        for name, value in results.items():
            self.history.setdefault(name, []).append(value)

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


_log = logging.getLogger(__name__)


class Recorder:
    """Creates the records of one run."""

    def __init__(
        self,
        program: Program,
        state: TrainState,
        batches: BatchSchedule,
        examples: int,
        timer: StepTimer,
        reporter: Reporter,
    ):
        self.history = History()  # the records so far
        self._program, self._state = program, state
        self._batches, self._examples = batches, examples
        self._timer, self._reporter = timer, reporter
        self._has_advised = False
        self._slow_rank = SlowRank()
        parts = program.strategy.optimizer_shards.state_bytes(program.model.optimizer)
        self._state_bytes = parts[0] if len(parts) > 1 else None

    def train(self, gradient_norm: float, inspection_fields: Mapping[str, float]) -> None:
        """Records the training since the last record; every process must call it, because timings are gathered."""
        program, window = self._program, self._state.progress.window
        seconds_by_rank = program.strategy.group.gather("timing", self._timer.own_seconds, LONG_SECONDS)
        scale = program.store.loss_scale
        timings = self._timer.window()
        step_seconds, remedy = timings.get("step_seconds", 0.0), program.synchronizer.remedy_for_slow_rank
        cost = cost_of_slowest(seconds_by_rank, step_seconds) if remedy else None
        record = {
            **self._header("train"),
            **window.results(program.metrics),
            "learning_rate": self._batches.learning_rate_factor
            * keras_internals.last_learning_rate(program.model.optimizer),
            **timings,
            **compare_ranks(seconds_by_rank),
            **({} if cost is None else {"slowest_rank_cost": cost}),
            "gradient_norm": gradient_norm,
            **({} if scale is None else {"loss_scale": scale, "skipped_steps": window.skipped}),
            **program.cost,
            **staleness(program.strategy, program.model, self._state.step),
            **inspection_fields,
            **program.synchronizer.take_fields(),
            **({} if self._state_bytes is None else {"optimizer_state_bytes": self._state_bytes}),
            **peak_memory(),
        }
        self._state.progress.window = RunningMetrics()
        self._write(record)
        self._advise(record)
        if remedy and self._state.speeds is None:  # otherwise, rows are allocated by measured speed
            warning = self._slow_rank.observe(seconds_by_rank, step_seconds, self._state.step)
            if warning and program.strategy.is_chief:
                warn_once(with_argument_names(f"{warning} {remedy}"), situation="slow rank")

    def evaluation(self, results: Mapping[str, float]) -> None:
        """Records the results of an evaluation."""
        self._write({**self._header("eval"), **results})

    def _header(self, kind: str) -> dict[str, Any]:
        step = self._state.step
        epoch = self._batches.position.examples_before(step) / self._examples
        return {"schema": 1, "kind": kind, "step": step, "epoch": epoch, "time": time.time()}

    def _write(self, record: dict[str, Any]) -> None:
        self.history.records.append(record)
        self._reporter.record(record)

    def _advise(self, record: dict[str, Any]) -> None:
        steps = self._program.steps
        compresses = bool(steps.compressed_names())
        text = None if self._has_advised else advice(record, compresses, steps.has_small_gradients)
        if text and self._program.strategy.is_chief:
            _log.info("%s", text)
        self._has_advised = self._has_advised or text is not None
