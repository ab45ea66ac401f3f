"""Options of `Trainer.fit` in addition to those of Keras's `fit`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from tfdist.checkpoint.manager import Checkpoints
from tfdist.coordination import Group
from tfdist.coordination.watchdog import Watchdog
from tfdist.data.batch_schedule import GLOBAL
from tfdist.errors import InputError, as_python, is_integer, is_number
from tfdist.pipelining.timeline import Timeline
from tfdist.reporting import Reporter
from tfdist.reporting.ledger_file import NullLedger
from tfdist.reporting.profile import NullProfile


class _FromConfig:
    """Base class of dataclasses whose fields are named like flags."""

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Returns the options with the values of a configuration's flags."""
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(_FromConfig):
    """The steps at which a run records, evaluates and saves; a step is an update.

    Attributes:
      log_every: steps between records of metrics, at least 1.
      eval_every: steps between evaluations, with another at the end of the run; 0 to evaluate at the end of each epoch.
        A run with fewer steps than `eval_every` is not evaluated.
      steps_per_call: maximum number of steps per call of the compiled loop, at least 1; affects speed, never the result.
      elastic_batch: the batch size that stays constant when a run resumes with a different number of replicas: "global",
        so that the result does not change; or "replica": on N replicas instead of N0, batches have batch_size / N0 * N
        examples, and the learning rate is multiplied by N / N0.

    Raises:
      InputError: a number of steps is too small or not an integer.
    """

    log_every: int = 10
    eval_every: int = 0
    steps_per_call: int = 10
    elastic_batch: str = GLOBAL

    def __post_init__(self) -> None:
        minimums = {"log_every": 1, "eval_every": 0, "steps_per_call": 1}
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if not is_integer(value) or value < minimum:
                raise InputError(f"{name} must be an integer of at least {minimum}. Received: {value!r}.")
            object.__setattr__(self, name, int(value))

    def call_steps(self, step: int, end: int, boundaries: Sequence[int]) -> int:
        """Returns the number of steps of the next call of the compiled loop, after `step` updates.

        The call has at most `steps_per_call` steps. It ends at the latest at the next record or evaluation, at the next of
        `boundaries`, which are further steps at which a call must end, and at `end`, where the run ends.
        """
        periods = [period for period in (self.log_every, self.eval_every) if period]
        ends = [end, *(step - step % period + period for period in periods), *(b for b in boundaries if b > step)]
        return min(self.steps_per_call, min(ends) - step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks(_FromConfig):
    """Measurements and checks during a run.

    Attributes:
      measure_every: steps between measurements of exposed communication, the first at step 100 at the latest; 0 disables them.
      compression_check_every: steps between comparisons of compressed with exact sums of gradients; 0 disables them.
      compression_max_error: relative error above which a gradient is subsequently summed exactly; 0 for no limit.
      check_sync_every: steps between checks that all replicas hold the same values; 0 disables them.
      stall_warning_seconds: seconds beyond twice the usual duration after which a call of the compiled loop is reported;
        0 disables this.
      stall_shutdown_seconds: seconds beyond twice the usual duration after which all processes end with exit code 4; 0
        disables this.
    """

    measure_every: int = 1000
    compression_check_every: int = 0
    compression_max_error: float = 0.0
    check_sync_every: int = 0
    stall_warning_seconds: float = 60.0
    stall_shutdown_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not is_number(value) or not value >= 0:
                raise InputError(f"{field.name} must be a number of at least 0. Received: {value!r}.")
            object.__setattr__(self, field.name, as_python(value))

    def watchdog(self, group: Group) -> Watchdog:
        """Returns the watchdog of the calls of a run's compiled loop."""
        return Watchdog(group, warning_seconds=self.stall_warning_seconds, shutdown_seconds=self.stall_shutdown_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reporting:
    """Destinations of the records of a run.

    Attributes:
      reporter: reports progress and metrics on the chief.
      profile: profiles certain steps.
      ledger: records the examples that this process uses, for example `tfdist.reporting.ledger_file.LedgerFile`.
      record_all_reduce_table: called on the chief with the table of algorithms, as CSV, after `all_reduce="auto"` measured it.
      record_timelines: called on the chief at the first step of `profile` with a pipeline's predicted and measured
        timelines, by title.
      strategy_reason: reason for the choice of the strategy, for the description that is printed at the start; "" for none.
      description: additional lines of the description, by name.
      findings: result of `check_examples` for the data; None to check the data.
    """

    reporter: Reporter = dataclasses.field(default_factory=Reporter)
    profile: NullProfile = dataclasses.field(default_factory=NullProfile)
    ledger: NullLedger = dataclasses.field(default_factory=NullLedger)
    strategy_reason: str = ""
    record_all_reduce_table: Callable[[str], None] = lambda table: None
    record_timelines: Callable[[Mapping[str, Timeline]], None] = lambda timelines: None
    description: Mapping[str, str] = dataclasses.field(default_factory=dict)
    findings: Sequence[tuple[str, str]] | None = None


class FitOptions(NamedTuple):
    """The options of one call of `Trainer.fit`."""

    schedule: Schedule
    checks: Checks
    reporting: Reporting
    checkpoints: Checkpoints | None  # None if the run is not saved
