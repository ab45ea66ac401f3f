"""Where a run is saved: durable checkpoints, and commits, each in a directory of its own, written beside the training."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfdist.checkpoint.peers import hosts
from tfdist.checkpoint.storage import (
    BackgroundWriter,
    CheckpointError,
    Part,
    Spread,
    commit,
    keeper,
    newest,
    remove,
    shard_bytes,
)
from tfdist.checkpoint.train_state import TrainState
from tfdist.checkpoint.transfer import ByteTransfer
from tfdist.coordination import Group
from tfdist.distribution.strategy import Strategy

_log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A run at one step.

    Attributes:
      step: updates done.
      seed: of the run.
      parts: what this process writes of it, copied.
      values: what is not a tensor, as JSON.
      state: from which the parts are.
      over: the hosts in whose directories it is to lie; None if all processes share one.
    """

    step: int
    seed: int
    parts: Sequence[Part]
    values: Any
    state: TrainState
    over: Spread | None = None


class Tier:
    """One directory with a run's checkpoints, and the thread that writes them there, one at a time.

    Attributes:
      written: the step of the last one that was given to be written, unless that has failed.
    """

    noun = "checkpoint"
    level = logging.INFO  # at which it is told that one is there

    def __init__(self, group: Group, directory: str, keep: int, flags: Mapping[str, Any]):
        """Args: group: of the run's processes; the others as in `Checkpoints`."""
        self._group = group
        self.directory = Path(directory).expanduser()
        self._keep = keep
        self._flags = flags
        self.written: int | None = None
        self._writer = BackgroundWriter()

    def start(self, saved: Saved) -> None:
        """Begins to write; the one before is written."""
        self.written = saved.step
        self._writer.start(lambda: self._write(saved))

    def wait(self) -> None:
        """Returns when nothing is being written; raises what the last write raised."""
        self._writer.wait()

    def drop(self) -> None:
        """As `wait`, while an error is being raised already."""
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
            noun=self.noun,
            over=saved.over,
        )
        if self._group.rank == 0:
            _log.log(self.level, "Saved step %d in %s.", saved.step, path)


class DurableTier(Tier):
    """Checkpoints that outlive the machine: that one has failed, all processes hear."""

    def __init__(self, *args: Any, strict: bool, on_failure: Callable[[], object]):
        """Args: args: as for the base class; strict: as in `Checkpoints`; on_failure: called on rank 0, by the writer."""
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
        """See base class; one that has failed is an error, or a warning, on all processes alike."""
        try:
            super().wait()
        except CheckpointError as error:
            self.written = None
            if strict or self._strict:
                raise
            if self._group.rank == 0:
                _log.warning("%s The run goes on; the next checkpoint is tried.", error)


class InMemoryTier(Tier):
    """Commits: that they fail is said once, until one is written again.

    Where hosts share no directory, each has what all replicas hold alike; what a process alone holds is on its own host, and,
    sent while the run waits, on the next one.
    """

    noun = "commit"
    level = logging.DEBUG

    def __init__(self, strategy: Strategy, *args: Any):
        """Args: strategy: of the processes; args: as for the base class, without its group."""
        super().__init__(strategy.group, *args)
        self._fails = False
        self._hosts = hosts(self._group, self.directory)
        self._is_first = any(host[0] == self._group.rank for host in self._hosts)
        self._carrier = ByteTransfer(strategy) if len(self._hosts) > 1 else None

    @property
    def outlives_a_host(self) -> bool:
        """Whether what one host has of a commit, others have, too."""
        return self._carrier is not None

    def start(self, saved: Saved) -> None:
        """See base class."""
        super().start(self._spread(saved, self._carrier) if self._carrier else saved)

    def _spread(self, saved: Saved, carrier: ByteTransfer) -> Saved:
        alike = saved.state.alike()
        own = [part for part in saved.parts if part.name not in alike]
        copies = carrier.to_one(shard_bytes(own), keeper(self._group.rank, self._hosts))
        over = Spread(self._hosts, saved.state.parts_alike(saved.parts) if self._is_first else (), copies)
        return saved._replace(parts=own, over=over)

    def clear(self) -> None:
        """Gives the memory back: nobody needs them any more."""
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
                _log.warning("%s The run goes on; the next commit is tried.", error)
            self._fails = True
