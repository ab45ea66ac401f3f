"""Destinations of checkpoints: durable and in memory, each with its own directory and background thread."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfdist.checkpoint.format import (
    BackgroundWriter,
    CheckpointError,
    HostPlacement,
    Part,
    commit,
    copy_holder,
    newest,
    remove,
    shard_bytes,
)
from tfdist.checkpoint.replication import hosts
from tfdist.checkpoint.run_variables import RunVariables
from tfdist.checkpoint.transfer import ByteTransfer
from tfdist.coordination import Group
from tfdist.distribution.strategy import Strategy
from tfdist.storage import path_of

_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """The state of a run at one step.

    Attributes:
      step: number of updates done.
      seed: seed of the run.
      parts: copies of what this process writes.
      values: what is not a tensor, as JSON.
      state: variables from which the parts were copied.
      over: hosts to which the files are distributed; None if all processes share a directory.
      kept: steps of the checkpoints to keep besides the newest ones.
    """

    step: int
    seed: int
    parts: Sequence[Part]
    values: Any
    state: RunVariables
    over: HostPlacement | None = None
    kept: Sequence[int] = ()


class Tier:
    """A directory with a run's checkpoints, and the thread that writes them, one at a time.

    Attributes:
      written: step of the last checkpoint whose write was started, unless it has failed.
    """

    noun = "checkpoint"
    level = logging.INFO  # of the message that one has been written

    def __init__(self, group: Group, directory: str, keep: int, flags: Mapping[str, Any]):
        """Initializes without writing; for the other arguments see `Checkpoints`.

        Args:
          group: group of the run's processes.
          directory: directory of the checkpoints.
          keep: number of checkpoints to keep.
          flags: flags of the run.
        """
        self._group = group
        self.directory = path_of(directory)
        self._keep = keep
        self._flags = flags
        self.written: int | None = None
        self._writer = BackgroundWriter()

    def start(self, saved: Saved) -> None:
        """Starts to write; the previous write must be complete."""
        self.written = saved.step
        self._writer.start(lambda: self._write(saved))

    def wait(self) -> None:
        """Waits until nothing is being written; raises the exception of the last write."""
        self._writer.wait()

    def drop(self) -> None:
        """Like `wait`, but ignores errors, because another error is being raised."""
        with contextlib.suppress(Exception):
            self._writer.wait()

    def _write(self, saved: Saved) -> None:
        path = commit(
            self._group,
            self.directory,
            saved.parts,
            step=saved.step,
            seed=saved.seed,
            flags=self._flags,
            values=saved.values,
            keep=self._keep,
            kept=saved.kept,
            noun=self.noun,
            over=saved.over,
        )
        if self._group.rank == 0:
            _log.log(self.level, "Saved step %d in %s.", saved.step, path)


class DurableTier(Tier):
    """Durable checkpoints; a failure is reported to all processes."""

    def __init__(self, *args: Any, strict: bool, on_failure: Callable[[], object]):
        """Initializes without writing.

        Args:
          *args: see base class.
          strict: see `Checkpoints`.
          on_failure: called on rank 0, from the writing thread.
        """
        super().__init__(*args)
        self._strict = strict
        self._on_failure = on_failure

    def _write(self, saved: Saved) -> None:
        try:
            super()._write(saved)
        except CheckpointError:
            if self._group.rank == 0:
                self._on_failure()
            raise

    def wait(self, strict: bool = False) -> None:
        """See base class. A failed write is an error, or a warning, on all processes."""
        try:
            super().wait()
        except CheckpointError as error:
            self.written = None
            if strict or self._strict:
                raise
            if self._group.rank == 0:
                _log.warning("%s The run continues, and tries again at the next checkpoint.", error)


class InMemoryTier(Tier):
    """In-memory checkpoints; only the first of consecutive failures is logged.

    If hosts share no directory, each has the replicated state. The state that only one process has is stored on
    its host and copied to the next one while training waits.
    """

    noun = "commit"
    level = logging.DEBUG

    def __init__(self, strategy: Strategy, *args: Any):
        """Initializes without writing.

        Args:
          strategy: strategy of the processes.
          *args: see base class, without the group.
        """
        super().__init__(strategy.group, *args)
        self._fails = False
        self._hosts = hosts(self._group, Path(str(self.directory)))
        self._is_first = any(host[0] == self._group.rank for host in self._hosts)
        self._carrier = ByteTransfer(strategy) if len(self._hosts) > 1 else None

    @property
    def survives_host_loss(self) -> bool:
        """Whether the checkpoint survives the loss of a host."""
        return self._carrier is not None

    def start(self, saved: Saved) -> None:
        """See base class."""
        super().start(self._spread(saved, self._carrier) if self._carrier else saved)

    def _spread(self, saved: Saved, carrier: ByteTransfer) -> Saved:
        replicated = saved.state.replicated()
        own = [part for part in saved.parts if part.name not in replicated]
        copies = carrier.to_one(shard_bytes(own), copy_holder(self._group.rank, self._hosts))
        over = HostPlacement(self._hosts, saved.state.replicated_parts(saved.parts) if self._is_first else (), copies)
        return saved._replace(parts=own, over=over)

    def clear(self) -> None:
        """Removes all checkpoints to free the memory."""
        if not self._is_first:
            return
        try:
            for path in newest(self.directory):
                remove(path)
        except OSError as error:
            _log.warning("Commits in %s could not be removed (%s).", self.directory, error.strerror)

    def _write(self, saved: Saved) -> None:
        try:
            super()._write(saved)
            self._fails = False
        except CheckpointError as error:
            if self._group.rank == 0 and not self._fails:
                _log.warning("%s The run continues, and tries again at the next commit.", error)
            self._fails = True
