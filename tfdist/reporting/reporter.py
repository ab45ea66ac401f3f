"""What the trainer tells about a run, and to whom: the interface of every progress bar, file and board."""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfdist.coordination import Json
from tfdist.reporting.ledger_file import NullLedger


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a training run sets out to do.

    Attributes:
      total_steps: the step (number of updates) at which training ends.
      batch_size: examples in one global batch.
      examples_per_epoch: examples in the training set; None where nobody knows.
      first_step: updates that were done before this run; above 0 when it continues another.
      examples_before: used in those updates; None if all had `batch_size` examples.
    """

    total_steps: int
    batch_size: int
    examples_per_epoch: int | None = None
    first_step: int = 0
    examples_before: int | None = None

    def epoch(self, step: int) -> float | None:
        """Returns how often the training set was seen after `step` updates; None where its size is not known."""
        if not self.examples_per_epoch:
            return None
        before = self.first_step * self.batch_size if self.examples_before is None else self.examples_before
        return (before + (step - self.first_step) * self.batch_size) / self.examples_per_epoch


class Reporter(abc.ABC):
    """One destination of what happens in a run.

    The order of calls is: `start` once, then `progress` and `record` as often as there is news, then `close` once. An
    evaluation on its own needs no `start`. Records follow `tfdist.reporting.schema`; every field of them but `kind`
    and `step` may be missing.
    """

    @abc.abstractmethod
    def start(self, plan: RunPlan) -> None:
        """Learns what the run sets out to do, before its first step."""

    @abc.abstractmethod
    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """Learns how far the run is: called after every compiled call, so it must be cheap.

        Args:
          step: updates done so far.
          record: the latest loss, metrics and rates by field name.
        """

    @abc.abstractmethod
    def record(self, record: Mapping[str, Json]) -> None:
        """Learns the result of a training window or of an evaluation: one line of metrics.jsonl."""

    def sync(self) -> None:
        """Returns when what was recorded is on the disk: a checkpoint is made, so that nobody records it again.

        For reporters that others read back when a run goes on; to do nothing is right for those that show.
        """

    @abc.abstractmethod
    def close(self, outcome: str) -> None:
        """Ends the report and releases what it holds.

        Args:
          outcome: how the run ended, in a few words for a person: `done`, `loss not finite`, `failed`.
        """


class NullReporter(Reporter):
    """Tells nobody: what the ranks other than the chief use."""

    def start(self, plan: RunPlan) -> None:
        """See base class."""

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class."""

    def close(self, outcome: str) -> None:
        """See base class."""


class MultiReporter(Reporter):
    """Tells several reporters, in order."""

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
        """See base class. Closes every reporter, also when one of them raises; the error is raised afterwards."""
        with contextlib.ExitStack() as stack:
            for reporter in reversed(self._reporters):
                stack.callback(reporter.close, outcome)


def synchronizer(ledger: NullLedger, reporter: Reporter | None) -> Callable[[], None]:
    """Returns what brings to the disk what belongs to a checkpoint and is not in it."""

    def synchronize() -> None:
        ledger.sync()
        if reporter:
            reporter.sync()

    return synchronize
