"""When a run is saved, and how: on all processes at the same step, in the background, and when it is preempted."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.checkpoint.storage import NoLock, lock, newest, step_of
from tfdist.checkpoint.tiers import DurableTier, InMemoryTier, Saved, Tier
from tfdist.coordination.sync_points import SyncPoints
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, Preempted
from tfdist.grammar.interval import parse_period
from tfdist.process.gce_notice import machine_notices
from tfdist.process.preemption import notices

_PREEMPTED, _DUE, _FAILED = "preempted", "checkpoint", "checkpoint failed"  # what processes meet for

_SECONDS = 3600.0  # in which the slowest rank comes to its first step

_log = logging.getLogger(__name__)

COMMITS_KEPT = 2  # the second is for when the newest is damaged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where and how often a run is saved.

    A run that is saved stops at SIGTERM and SIGINT on any of its processes: all save at the same step, and `fit` raises
    `tfdist.errors.Preempted`.

    Commits are checkpoints, too, for when a process dies, or one host of several: in memory, as /dev/shm is, they cost no
    disk's time, so that there may be many. Two stay. One that cannot be written is a warning.

    Attributes:
      directory: gets a folder for each checkpoint, `step-...`; on several hosts one that all see. One run at a time saves
        there: a second one is refused, and told the host, process and time of the first.
      every: steps, as in "500", or seconds, as in "600s", from one to the next; "0" for only when the run is preempted.
      keep: so many stay, the newest ones.
      in_background: whether training goes on while a checkpoint is written, once it is copied to host memory.
      strict: whether a checkpoint that cannot be written ends the run; else it is a warning, and the next one is tried.
      flags: kept in each checkpoint, for who asks what a run was.
      commit_every: steps from one commit to the next; 0 for none.
      commit_directory: gets the commits, of this run alone. Where each host has a directory of its own by this name, what
        a process alone holds is sent to the next host, too. They are gone when the run has come to its end and a checkpoint of
        that step is there.
    """

    directory: str
    every: str = "0"
    keep: int = 3
    in_background: bool = True
    strict: bool = True
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    commit_every: int = 0
    commit_directory: str = ""

    def __post_init__(self) -> None:
        """Checks what can be; raises `InputError`."""
        parse_period(self.every)
        if self.keep < 1:
            raise InputError(f"At least one checkpoint must stay. Received: keep={self.keep}. Leave it out for 3.")
        if self.commit_every < 0 or bool(self.commit_every) != bool(self.commit_directory):
            raise InputError(
                "Commits are made every so many steps in a directory: give commit_every of at least 1 and commit_directory or "
                f"neither. Received: commit_every={self.commit_every}, commit_directory={self.commit_directory!r}."
            )
        if self.commit_directory and _same(self.commit_directory, self.directory):
            raise InputError(
                "Commits and checkpoints push out the oldest of their own kind, so each has a directory. Received for both: "
                f"{self.directory}. Give another commit_directory."
            )


def _same(one: str, other: str) -> bool:
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


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

    def __init__(
        self,
        options: Checkpoints,
        strategy: Strategy,
        sync_points: SyncPoints,
        saved: Callable[[], Saved],
        synchronize: Callable[[], object],
    ):
        self._group = group = strategy.group
        self._sync_points = sync_points
        self._saved = saved
        self._synchronize = synchronize
        self._in_background = options.in_background
        self._period = parse_period(options.every)
        self._periods = [steps for steps in (self._period.steps, options.commit_every) if steps]
        self._durable = DurableTier(
            group,
            options.directory,
            options.keep,
            options.flags,
            strict=options.strict,
            on_failure=lambda: sync_points.wish(_FAILED),
        )
        self._commit_every = options.commit_every
        self._commits = (
            InMemoryTier(strategy, options.commit_directory, COMMITS_KEPT, options.flags)
            if options.commit_every
            else None
        )
        self._step = -1  # the last that was asked about
        self._wished_at = time.monotonic()

    def next(self, step: int) -> int | None:
        """See base class."""
        return min((step - step % every + every for every in self._periods), default=None)

    def begin(self, end: int) -> None:
        """See base class."""
        self._sync_points.begin(end)

    def at(self, step: int, is_last: bool = False) -> None:
        """See base class."""
        self._step = step
        due = self._sync_points.reached(step)
        if _FAILED in due:
            self._durable.wait()
        periodic = self._period.steps and step % self._period.steps == 0
        is_on = bool(self._period.steps or self._period.seconds)
        durable = periodic or _DUE in due or _PREEMPTED in due or (is_last and is_on)
        commit = self._commit_every and step % self._commit_every == 0
        wanted = [self._commits if commit else None, self._durable if durable else None]  # the commit is there sooner
        self._save([store for store in wanted if store and store.written != step])
        if _PREEMPTED in due:
            self._durable.wait(strict=True)
            raise Preempted(
                f"Preempted: stopped at step {step}, which is saved in {self._durable.directory}. The same command goes on, "
                "with the same --output_dir."
            )
        self._ask_for_another()

    def finish(self) -> None:
        """Returns when what was begun is on the disk; the run has come to its end."""
        self._durable.wait()
        if self._commits:
            self._commits.wait()
            if self._durable.written == self._step:
                self._commits.clear()

    def drop(self) -> None:
        """Lets a write that is under way come to its end, whatever it is: an error is being raised already."""
        self._durable.drop()
        if self._commits:
            self._commits.drop()

    def _ask_for_another(self) -> None:
        if self._period.seconds and self._group.rank == 0:
            now = time.monotonic()
            if now - self._wished_at >= self._period.seconds:
                self._wished_at = now
                self._sync_points.wish(_DUE)

    def _save(self, stores: Sequence[Tier]) -> None:
        """Copies the run once, and begins to write it; no process begins before all are done with the one before."""
        if not stores:
            return
        for store in stores:
            store.wait()
        saved = self._saved()
        if self._durable in stores or (self._commits and self._commits.outlives_a_host):
            self._synchronize()
        for store in stores:
            store.start(saved)
        if not self._in_background:
            for store in stores:
                store.wait()


@contextlib.contextmanager
def saver(
    options: Checkpoints | None,
    strategy: Strategy,
    step: int,
    saved: Callable[[], Saved],
    synchronize: Callable[[], object],
) -> Iterator[Saving]:
    """What a run asks whether to save; behind the block everything is on the disk.

    Args:
      options: None for a run that is not saved.
      strategy: of the run's processes.
      step: updates done so far.
      saved: returns the run as it is, copied to the host; called on every process.
      synchronize: returns when what belongs to a checkpoint and is not in it is on the disk. A commit on one host does without:
        a process that dies takes nothing that was written with it.

    Raises:
      InputError: on all ranks: another run saves to the directory, or has left later checkpoints there.
    """
    if options is None:
        yield Saving()
        return
    with (
        _claimed(options, strategy, step),
        SyncPoints(strategy.group) as sync_points,
        notices(lambda _: sync_points.wish(_PREEMPTED)),
        machine_notices(lambda _: sync_points.wish(_PREEMPTED)),
    ):
        made = _Saver(options, strategy, sync_points, saved, synchronize)
        try:
            yield made
        except BaseException:
            made.drop()
            raise
        made.finish()


@contextlib.contextmanager
def _claimed(options: Checkpoints, strategy: Strategy, step: int) -> Iterator[None]:
    """Inside, no other run saves to the directory of checkpoints; what the chief finds there, all ranks hear.

    Raises:
      InputError: on all ranks: another run does, or has left later checkpoints.
    """
    with contextlib.ExitStack() as stack:
        refusal = ""
        if strategy.is_chief:
            try:
                _lock(Path(options.directory).expanduser(), stack)
                for directory in filter(None, (options.directory, options.commit_directory)):
                    _check_nothing_is_ahead(Path(directory).expanduser(), step)
            except InputError as error:
                refusal = str(error)
        if refusal := strategy.group.broadcast("checkpoints/claimed", refusal, _SECONDS):
            raise InputError(refusal)
        yield


def _lock(directory: Path, stack: contextlib.ExitStack) -> None:
    """Where there can be no lock, the run is warned; if it cannot write there either, its first checkpoint says so."""
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        stack.enter_context(lock(directory, "give another directory"))
    except NoLock as error:
        _log.warning("%s Nothing keeps another run from writing there.", error)


def _check_nothing_is_ahead(directory: Path, step: int) -> None:
    """Raises `InputError` where a later checkpoint would be taken for this run's newest, and push its own ones out."""
    found = newest(directory)
    if found and step_of(found[0]) > step:
        raise InputError(
            f"A run that is saved at step {step} needs a directory without later checkpoints. Received: {found[0]}. Give "
            "another directory, or call trainer.resume first."
        )
