"""When a run is saved, and how: on all processes at the same step, in the background, and when it is preempted."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfdist.checkpoint import BackgroundWriter, CheckpointError, Part, commit, newest, step_of
from tfdist.errors import InputError, Preempted
from tfdist.group import Group
from tfdist.meetings import Meetings
from tfdist.period import parse_period
from tfdist.preemption import notices

_PREEMPTED, _DUE, _FAILED = "preempted", "checkpoint", "checkpoint failed"  # what processes meet for

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where and how often a run is saved.

    A run that is saved stops at SIGTERM and SIGINT on any of its processes: all save at the same step, and `fit` raises
    `tfdist.errors.Preempted`.

    Attributes:
      directory: gets a folder for each checkpoint, `step-...`; on several hosts one that all see.
      every: steps, as in "500", or seconds, as in "600s", from one to the next; "0" for only when the run is preempted.
      keep: so many stay, the newest ones.
      in_background: whether training goes on while a checkpoint is written, once it is copied to host memory.
      strict: whether a checkpoint that cannot be written ends the run; else it is a warning, and the next one is tried.
      flags: kept in each checkpoint, for who asks what a run was.
    """

    directory: str
    every: str = "0"
    keep: int = 3
    in_background: bool = True
    strict: bool = True
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what can be; raises `InputError`."""
        parse_period(self.every)
        if self.keep < 1:
            raise InputError(f"At least one checkpoint must stay. Received: keep={self.keep}. Leave it out for 3.")


class Saved(NamedTuple):
    """A run at one step.

    Attributes:
      step: updates done.
      seed: of the run.
      parts: what this process writes of it, copied.
      values: what is not a tensor, as JSON.
    """

    step: int
    seed: int
    parts: Sequence[Part]
    values: Any


class Saving:
    """What a run asks between its calls; by itself it saves nothing."""

    def next(self, step: int) -> int | None:
        """A step behind this one at which a call has to end; None if it does not matter."""
        return None

    def begin(self, end: int) -> None:
        """A call of the compiled loop begins that ends at a step."""

    def at(self, step: int, is_last: bool = False) -> None:
        """Saves the run, if it is time to; everything that belongs to the step is done.

        Args:
          step: updates done.
          is_last: whether the run ends here.

        Raises:
          Preempted: the run has to stop, and is saved.
          CheckpointError: it could not be saved.
        """


class _Saver(Saving):
    """Saves a run as `Checkpoints` say."""

    def __init__(self, options: Checkpoints, group: Group, meetings: Meetings, saved: Callable[[], Saved]):
        self._options = options
        self._group = group
        self._meetings = meetings
        self._saved = saved
        self._directory = Path(options.directory).expanduser()
        self._period = parse_period(options.every)
        self._wished_at = time.monotonic()
        self._written: int | None = None
        self._writer = BackgroundWriter()

    def next(self, step: int) -> int | None:
        """See base class."""
        every = self._period.steps
        return step - step % every + every if every else None

    def begin(self, end: int) -> None:
        """See base class."""
        self._meetings.begin(end)

    def at(self, step: int, is_last: bool = False) -> None:
        """See base class."""
        due = self._meetings.reached(step)
        if _FAILED in due:
            self._wait()
        periodic = self._period.steps and step % self._period.steps == 0
        is_on = bool(self._period.steps or self._period.seconds)
        if periodic or _DUE in due or _PREEMPTED in due or (is_last and is_on):
            self._save(step)
        if _PREEMPTED in due:
            self._wait(strict=True)
            raise Preempted(
                f"Preempted: stopped at step {step}, which is saved in {self._directory}. The same command goes on, with the "
                "same --output_dir."
            )
        self._ask_for_another()

    def finish(self) -> None:
        """Returns when what was begun is on the disk."""
        self._wait()

    def drop(self) -> None:
        """Lets a write that is under way come to its end, whatever it is: an error is being raised already."""
        with contextlib.suppress(Exception):
            self._writer.wait()

    def _ask_for_another(self) -> None:
        if self._period.seconds and self._group.rank == 0:
            now = time.monotonic()
            if now - self._wished_at >= self._period.seconds:
                self._wished_at = now
                self._meetings.wish(_DUE)

    def _save(self, step: int) -> None:
        if step == self._written:
            return
        self._wait()  # all processes begin to write with the same checkpoint
        self._written = step
        saved, options = self._saved(), self._options

        def write() -> None:
            path = commit(
                self._group,
                self._directory,
                saved.parts,
                step=saved.step,
                seed=saved.seed,
                flags=options.flags,
                values=saved.values,
                keep=options.keep,
            )
            if self._group.rank == 0:
                _log.info("Saved step %d in %s.", saved.step, path)

        def write_and_tell() -> None:
            try:
                write()
            except CheckpointError:
                if self._group.rank == 0:
                    self._meetings.wish(_FAILED)
                raise

        self._writer.start(write_and_tell)
        if not options.in_background:
            self._wait()

    def _wait(self, strict: bool = False) -> None:
        """Until the last checkpoint is on the disk; one that failed is an error, or a warning, on all processes alike."""
        try:
            self._writer.wait()
        except CheckpointError as error:
            self._written = None
            if strict or self._options.strict:
                raise
            if self._group.rank == 0:
                _log.warning("%s The run goes on; the next checkpoint is tried.", error)


@contextlib.contextmanager
def saver(
    options: Checkpoints | None, group: Group, step: int, saved: Callable[[], Saved], on_report: Callable[[], object]
) -> Iterator[Saving]:
    """What a run asks whether to save; behind the block everything is on the disk.

    Args:
      options: None for a run that is not saved.
      group: of the run's processes.
      step: updates done so far.
      saved: returns the run as it is, copied to the host; called on every process.
      on_report: what SIGUSR1 does.
    """
    if options is None:
        yield Saving()
        return
    if group.rank == 0:
        _check_nothing_is_ahead(Path(options.directory).expanduser(), step)
    with Meetings(group) as meetings, notices(lambda _: meetings.wish(_PREEMPTED), on_report):
        made = _Saver(options, group, meetings, saved)
        try:
            yield made
        except BaseException:
            made.drop()
            raise
        made.finish()


def _check_nothing_is_ahead(directory: Path, step: int) -> None:
    """Raises `InputError` where a later checkpoint would be taken for this run's newest, and push its own ones out."""
    found = newest(directory)
    if found and step_of(found[0]) > step:
        raise InputError(
            f"A run that is saved at step {step} needs a directory without later checkpoints. Received: {found[0]}. Give "
            "another directory, or call trainer.resume first."
        )
