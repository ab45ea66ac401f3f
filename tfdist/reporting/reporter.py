"""The interface of reporters, to which the trainer reports the progress of a run."""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfdist.coordination import Json
from tfdist.reporting.ledger_file import NullLedger


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a training run.

    Attributes:
      total_steps: the step (number of updates) at which training ends.
      batch_size: number of examples in a global batch.
      examples_per_epoch: number of examples in the training set; None if unknown.
      first_step: number of updates done before this run; positive if it resumes another.
      examples_before: number of examples used in those updates; None if all had `batch_size` examples.
    """

    total_steps: int
    batch_size: int
    examples_per_epoch: int | None = None
    first_step: int = 0
    examples_before: int | None = None

    def epoch(self, step: int) -> float | None:
        """Returns the number of epochs after `step` updates; None if the size of the training set is unknown."""
        if not self.examples_per_epoch:
            return None
        before = self.first_step * self.batch_size if self.examples_before is None else self.examples_before
        return (before + (step - self.first_step) * self.batch_size) / self.examples_per_epoch


class Reporter(abc.ABC):
    """A destination for reports of a run.

    `start` is called once, then `progress` and `record` repeatedly, then `close` once. A separate evaluation needs no
    `start`. Records follow `tfdist.reporting.schema`; all their fields except `kind` and `step` may be missing.
    """

    @abc.abstractmethod
    def start(self, plan: RunPlan) -> None:
        """Called before the first step."""

    @abc.abstractmethod
    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """Called after every compiled call, so it must be cheap.

        Args:
          step: number of updates done so far.
          record: latest loss, metrics and rates by field name.
        """

    @abc.abstractmethod
    def record(self, record: Mapping[str, Json]) -> None:
        """Called with the result of a training window or of an evaluation: one line of metrics.jsonl."""

    def sync(self) -> None:
        """Flushes all records to disk before a checkpoint, because they will not be recorded again.

        For reporters whose output is read when a run resumes; others need to do nothing.
        """

    @abc.abstractmethod
    def close(self, outcome: str) -> None:
        """Ends the report and releases resources.

        Args:
          outcome: how the run ended, in a few words: `done`, `loss not finite`, `failed`; empty if that needs no words.
        """


class NullReporter(Reporter):
    """A reporter that does nothing, for ranks other than the chief."""

    def start(self, plan: RunPlan) -> None:
        """See base class."""

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class."""

    def close(self, outcome: str) -> None:
        """See base class."""


class MultiReporter(Reporter):
    """Forwards to several reporters, in order."""

    def __init__(self, reporters: Sequence[Reporter]):
        self._reporters = tuple(reporters)

    def start(self, plan: RunPlan) -> None:
        """See base class."""
        for reporter in self._reporters:
            reporter.start(plan)

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""
        for reporter in self._reporters:
            reporter.progress(step, record)

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class."""
        for reporter in self._reporters:
            reporter.record(record)

    def sync(self) -> None:
        """See base class."""
        for reporter in self._reporters:
            reporter.sync()

    def close(self, outcome: str) -> None:
        """See base class. Closes all reporters even if one of them raises an error, which is raised afterwards."""
        with contextlib.ExitStack() as stack:
            for reporter in reversed(self._reporters):
                stack.callback(reporter.close, outcome)


def synchronizer(ledger: NullLedger, reporter: Reporter | None) -> Callable[[], None]:
    """Returns a function that flushes to disk what belongs to a checkpoint but is stored elsewhere."""

    def synchronize() -> None:
        ledger.sync()
        if reporter:
            reporter.sync()

    return synchronize
