"""Records of metrics during a run: in its history, and with its reporter."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist import keras_internals
from tfdist.coordination.timeouts import LONG_SECONDS
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.diagnostics import advice
from tfdist.errors.arguments import with_argument_names
from tfdist.pipelining.staleness import staleness
from tfdist.reporting import Reporter, StepTimer
from tfdist.reporting.memory import peak_memory
from tfdist.reporting.timing import cost_of_slowest, over_ranks
from tfdist.reporting.warn_once import warn_once
from tfdist.step.running_metrics import RunningMetrics
from tfdist.trainer.history import History
from tfdist.trainer.program import Program
from tfdist.trainer.slow_rank import SlowRank
from tfdist.trainer.train_state import TrainState

_log = logging.getLogger(__name__)


class Recorder:
    """Makes the records of one run.

    Attributes:
      history: the records so far.
    """

    def __init__(
        self,
        program: Program,
        state: TrainState,
        batches: BatchSchedule,
        examples: int,
        timer: StepTimer,
        reporter: Reporter,
    ):
        """Initializes without records.

        Args:
          program: what is trained.
          state: state of the run.
          batches: the run's batches.
          examples: number of examples per epoch.
          timer: measures the calls of the compiled loop.
          reporter: gets each record on the chief.
        """
        self.history = History()
        self._program, self._state = program, state
        self._batches, self._examples = batches, examples
        self._timer, self._reporter = timer, reporter
        self._advised = False
        self._slow_rank = SlowRank()
        parts = program.strategy.optimizer_shards.state_bytes(program.model.optimizer)
        self._state_bytes = parts[0] if len(parts) > 1 else None

    def train(self, gradient_norm: float, inspected: Mapping[str, float]) -> None:
        """Records training since the last record; every process must call it, as timings are gathered.

        Args:
          gradient_norm: global gradient norm of the last step.
          inspected: results of inspections.
        """
        program, window = self._program, self._state.progress.window
        everyone = program.strategy.group.gather("timing", self._timer.own_seconds, LONG_SECONDS)
        scale = program.loss_scale
        timings = self._timer.window()
        cost = cost_of_slowest(everyone, timings.get("step_seconds", 0.0))
        record = {
            **self._header("train"),
            **window.results(program.metrics),
            "learning_rate": self._batches.rate * keras_internals.last_learning_rate(program.model.optimizer),
            **timings,
            **over_ranks(everyone),
            **({} if cost is None else {"slowest_rank_cost": cost}),
            "gradient_norm": gradient_norm,
            **({} if scale is None else {"loss_scale": scale, "skipped_steps": window.skipped}),
            **program.cost,
            **staleness(program.strategy, program.model, self._state.step),
            **inspected,
            **({} if self._state_bytes is None else {"optimizer_state_bytes": self._state_bytes}),
            **peak_memory(),
        }
        self._state.progress.window = RunningMetrics()
        self._write(record)
        self._advise(record)
        if self._state.speeds is None:  # otherwise, rows are allocated by speed
            self._name_slow_rank(everyone, timings.get("step_seconds", 0.0))

    def _name_slow_rank(self, own_seconds: Sequence[Any], step_seconds: float) -> None:
        found = self._slow_rank.observe(own_seconds, step_seconds, self._state.step)
        if found and self._program.strategy.is_chief:
            warn_once(with_argument_names(found), situation="slow rank")

    def evaluation(self, results: Mapping[str, float]) -> None:
        """Records the results of an evaluation."""
        self._write({**self._header("eval"), **results})

    def _header(self, kind: str) -> dict[str, Any]:
        step = self._state.step
        seen = self._batches.position.before(step) / self._examples
        return {"schema": 1, "kind": kind, "step": step, "epoch": seen, "time": time.time()}

    def _write(self, record: dict[str, Any]) -> None:
        self.history.records.append(record)
        self._reporter.record(record)

    def _advise(self, record: dict[str, Any]) -> None:
        steps = self._program.steps
        found = None if self._advised else advice(record, steps.compresses, steps.has_small_gradients)
        if found and self._program.strategy.is_chief:
            _log.info("%s", found)
        self._advised = self._advised or found is not None
