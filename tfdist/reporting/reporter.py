"""The interface of reporters, which receive the progress of a run from the trainer."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdist.coordination import Json
from tfdist.reporting.file_errors import AppendOnlyFile, reraise_as_write_error
from tfdist.reporting.schema import SCHEMA, to_json
from tfdist.storage import AnyPath, path_of, storage_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a training run."""

    total_steps: int  # the step (number of updates) at which training ends
    batch_size: int  # number of examples in a global batch
    examples_per_epoch: int | None = None  # number of examples in the training set; None if unknown
    first_step: int = 0  # number of updates before this run; positive if it is resumed
    examples_before: int | None = None  # number of examples in these updates; None if each had `batch_size` examples
    # Index of the epoch in the data's stream that is displayed as epoch 1; negative if the first displayed epoch has a higher
    # number.
    first_epoch: int = 0
    shows_communication: bool = False  # whether to display the size and the time of a step's communication
    # Model, data and devices, as texts by name, to display before the first step; may be empty.
    description: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def epoch(self, step: int) -> float | None:
        """Returns the number of epochs after `step` updates; None if the size of the training set is unknown."""
        if not self.examples_per_epoch:
            return None
        return self._examples(step) / self.examples_per_epoch

    def epoch_text(self, step: int) -> str:
        """Returns the epoch to which update number `step` belongs, such as `epoch 3/20`, counted from 1; "" if unknown.

        The step that completes an epoch belongs to it, even if it uses the first examples of the next one.
        """
        if not self.examples_per_epoch:
            return ""
        # At the start, the epoch of the next update is displayed.
        displayed_step = step + 1 if step == self.first_step < self.total_steps else step
        return f"epoch {self._epoch_number(displayed_step)}/{self._epoch_number(self.total_steps)}"

    def _epoch_number(self, step: int) -> int:
        """Returns the epoch, counted from 1, of the first example of update number `step`."""
        assert self.examples_per_epoch
        return self._examples(max(step - 1, 0)) // self.examples_per_epoch - self.first_epoch + 1

    def _examples(self, step: int) -> int:
        earlier_examples = self.first_step * self.batch_size if self.examples_before is None else self.examples_before
        return earlier_examples + (step - self.first_step) * self.batch_size


class Reporter:
    """A destination for reports of a run. The base class reports nothing and is used on ranks other than the chief.

    `start` is called once, then `progress` and `record` repeatedly, then `close` once. A separate evaluation needs no
    `start`. Records follow `tfdist.reporting.schema`; all fields except `kind` and `step` may be missing.
    """

    def start(self, plan: RunPlan) -> None:
        """Called before the first step."""

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """Called after every call of the compiled loop, with the number of updates and the latest fields; must be cheap."""

    @contextlib.contextmanager
    def busy(self, task: str) -> Iterator[None]:
        """Context of a long task, such as "compiling the training step", which may be displayed."""
        yield

    def record(self, record: Mapping[str, Json]) -> None:
        """Called with the result of a training window or an evaluation: one line of metrics.jsonl."""

    def sync(self) -> None:
        """Flushes all records to disk before a checkpoint, because they will not be repeated.

        Only needed by reporters whose output is read when a run resumes.
        """

    def close(self, outcome: str) -> None:
        """Ends the report and releases resources.

        The outcome is a short text, such as `done`, `loss not finite` or `failed`; empty if it is not reported.
        """


class MultiReporter(Reporter):
    """Forwards to several reporters, in order. `close` closes all even if one of them raises an error."""

    def __init__(self, reporters: Sequence[Reporter]):
        self._reporters = tuple(reporters)

    def _forward(self, method: str, *args: Any) -> None:
        for reporter in self._reporters:
            getattr(reporter, method)(*args)

    def start(self, plan: RunPlan) -> None:
        self._forward("start", plan)

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        self._forward("progress", step, record)

    def record(self, record: Mapping[str, Json]) -> None:
        self._forward("record", record)

    def sync(self) -> None:
        self._forward("sync")

    @contextlib.contextmanager
    def busy(self, task: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for reporter in self._reporters:
                stack.enter_context(reporter.busy(task))
            yield

    def close(self, outcome: str) -> None:
        with contextlib.ExitStack() as stack:
            for reporter in reversed(self._reporters):
                stack.callback(reporter.close, outcome)


class MetricsFile(Reporter):
    """Appends each record to a file, as one line of JSON.

    Records survive a crash of the process and, up to the last `sync`, a crash of the machine. The file is created immediately.
    A value without a JSON equivalent raises `TypeError`.
    """

    def __init__(self, path: AnyPath):
        self._file = AppendOnlyFile(path)

    def record(self, record: Mapping[str, Json]) -> None:
        line = {"schema": SCHEMA, **record}
        self._file.write(json.dumps(to_json(line), allow_nan=False).encode() + b"\n")

    def sync(self) -> None:
        self._file.sync()

    def close(self, outcome: str) -> None:
        self._file.close()


class OutcomeFile(Reporter):
    """Writes the outcome of a run; the file does not exist while the run is running, or after it was killed."""

    def __init__(self, path: AnyPath, clock: Callable[[], float] = time.time):
        self._path, self._clock = path_of(path), clock
        with reraise_as_write_error(path), contextlib.suppress(FileNotFoundError):
            storage_of(self._path).remove(self._path)

    def close(self, outcome: str) -> None:
        text = json.dumps({"outcome": outcome, "time": self._clock()})
        with reraise_as_write_error(self._path):
            storage_of(self._path).replace(self._path, f"{text}\n".encode())
