"""Checkpoints in several places: durable, in memory, and in the memory of other hosts, to which files are copied."""

import contextlib
import errno
import functools
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.checkpoint.format import (
    BackgroundWriter,
    Checkpoint,
    CheckpointError,
    HostPlacement,
    LocalFiles,
    Part,
    clean_partial,
    commit,
    copy_holder,
    newest,
    remove,
    shard_bytes,
)
from tfdist.checkpoint.run_variables import RunVariables
from tfdist.coordination import Group
from tfdist.coordination.group import LONG_SECONDS
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, TfdistError
from tfdist.storage import path_of

# Total bytes that all processes send at once; an engine may deliver all of them to each process.
_MAX_BYTES_AT_ONCE = 64 << 20
_log = logging.getLogger(__name__)
_MARK = ".host"  # a file that distinguishes directories of the same name on different hosts
_ATTEMPTS, _PAUSE = 500, 0.01  # seconds


class ByteTransfer:
    """Sends bytes between processes while nothing else is sent.

    All processes must make the same calls, from their main thread. Each process sends from its first replica.

    Attributes:
      piece: maximum bytes that a process sends at once.
    """

    def __init__(self, strategy: Strategy):
        """Initializes the transfer without compiling anything.

        Args:
          strategy: strategy of the processes.

        Raises:
          InputError: it has no collectives between its processes.
        """
        check_can_transfer(strategy)
        self._strategy = strategy
        self._packed = strategy.collectives.wire.packed
        self._local = len(strategy.local_replicas)
        self.piece = max(_MAX_BYTES_AT_ONCE // strategy.replicas, 1 << 10)
        self._to_one = self._traced(self._exchange)
        self._to_all = self._traced(self._gather)

    def to_one(self, data: np.ndarray, process: int) -> dict[int, np.ndarray]:
        """Sends bytes from each process to one other process.

        Args:
          data: uint8, of any length.
          process: the receiver.

        Returns:
          What other processes have sent to this one, uint8, by rank.
        """
        messages = self._strategy.group.gather("carrying/to one", [data.size, process], LONG_SECONDS)
        own_rank = self._strategy.cluster.rank
        buffers = {rank: np.empty(size, np.uint8) for rank, (size, to) in enumerate(messages) if to == own_rank}
        for start in range(0, max(size for size, _ in messages), self.piece):
            received = self._transmit(self._to_one, data[start : start + self.piece], process)
            for buffer in buffers.values():
                received = self._unpack(received, buffer[start : start + self.piece])
        return buffers

    def to_all(self, data: np.ndarray) -> dict[int, np.ndarray]:
        """Sends the bytes of each process to all processes.

        Args:
          data: uint8, at most `piece` bytes; must not be empty on all processes.

        Returns:
          What each process has sent, uint8, by rank; empty arrays for those that sent nothing.
        """
        sizes = self._strategy.group.gather("carrying/to all", data.size, LONG_SECONDS)
        received = self._transmit(self._to_all, data)
        buffers = {}
        for rank, size in enumerate(sizes):
            buffers[rank] = np.empty(size, np.uint8)
            received = self._unpack(received, buffers[rank])
        return buffers

    def _transmit(self, function: Any, data: np.ndarray, process: int = 0) -> np.ndarray:
        packed = np.zeros(self._padded(data.size), np.uint8)
        packed[: data.size] = data
        words = packed.view(self._packed.as_numpy_dtype)
        splits = np.zeros(self._strategy.replicas, np.int32)
        splits[process * self._local] = words.size
        sent = function()(tf.constant(words), tf.constant(splits))
        return np.asarray(self._strategy.local(sent)[0]).view(np.uint8)

    def _unpack(self, received: np.ndarray, buffer: np.ndarray) -> np.ndarray:
        """Copies the first bytes into an array; returns the following ones."""
        buffer[:] = received[: buffer.size]
        return received[self._padded(buffer.size) :]

    def _padded(self, size: int) -> int:
        """Returns the number of bytes including padding."""
        return -(-size // self._packed.size) * self._packed.size

    def _traced(self, function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Any:
        """Returns a lazily traced replica function, the same on all processes, whatever is sent."""
        compiled: Any = self._strategy.compiled(lambda *args: self._strategy.run(function, *args))
        splits = tf.TensorSpec([self._strategy.replicas], tf.int32)
        return functools.cache(lambda: compiled.get_concrete_function(tf.TensorSpec([None], self._packed), splits))

    def _exchange(self, data: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        own = self._own()
        sent = data[: tf.size(data) * own]
        return self._strategy.collectives.all_to_all([sent], splits=splits * own, name="carrying/to_one")[0]

    def _gather(self, data: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return self._strategy.collectives.all_gather([data[: tf.size(data) * self._own()]], name="carrying/to_all")[0]

    def _own(self) -> tf.Tensor:
        """Returns 1 on a process's first replica, else 0."""
        return tf.cast(tf.equal(self._strategy.collectives.rank % self._local, 0), tf.int32)


def can_transfer(strategy: Strategy) -> bool:
    """Returns whether a strategy's processes can send each other bytes, whose number is known only at run time."""
    # With other collectives of the job, a replica is spread over processes; workers of parameter servers may be lost.
    return not (strategy.compiles_replicas or strategy.remote) and strategy.job_collectives is strategy.collectives


def check_can_transfer(strategy: Strategy) -> None:
    """Raises `InputError` if a strategy's processes cannot send each other bytes."""
    if not can_transfer(strategy):
        raise InputError(
            "Commits of hosts that share no directory are sent over the collectives of the strategy. Received: "
            f"{strategy.name}, which has none between processes. Give a --commit_dir that all hosts share, or leave "
            "out --commit_every."
        )


def hosts(group: Group, directory: Path) -> list[list[int]]:
    """Returns the ranks that share a directory, for each directory of this name; every rank must call it.

    Creates the directory if necessary, with a small file in it.

    Raises:
      InputError: on all ranks, if it cannot be written.
    """
    mark = failure = ""
    try:
        mark = _mark(directory)
    except OSError as error:
        failure = f"{directory} ({error.strerror})"
    answers = group.gather("commits/hosts", [mark, failure], LONG_SECONDS)
    ranks_by_mark: dict[str, list[int]] = {}
    for rank, (mark, failure) in ((rank, answer) for rank, answer in enumerate(answers) if answer):
        if failure:
            raise InputError(
                f"Commits need a writable directory. Received, on rank {rank}: {failure}. Give another --commit_dir."
            )
        ranks_by_mark.setdefault(mark, []).append(rank)
    return list(ranks_by_mark.values())


def _mark(directory: Path) -> str:
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / _MARK
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        file.write(secrets.token_hex(8))
    for _ in range(_ATTEMPTS):  # the process that created it may not have written it yet
        if text := path.read_text():
            return text
        time.sleep(_PAUSE)
    raise OSError(errno.EIO, f"{_MARK} in it is empty")


def share(strategy: Strategy, folder: Path) -> list[str] | None:
    """Copies the newest in-memory checkpoint that is complete across all hosts to each host. Removes none.

    Every process must call it before reading an in-memory checkpoint.

    Args:
      strategy: strategy of the processes.
      folder: directory of this host's in-memory checkpoints.

    Returns:
      Names of the in-memory checkpoints that are complete on every host; None if all processes share a directory, or
        cannot send files, in which case none has been examined.
    """
    group = strategy.group
    host_ranks = _hosts_or_processes(group, folder) if group.size > 1 else [[0]]
    if len(host_ranks) == 1 or not can_transfer(strategy):
        return None
    first_ranks = [host[0] for host in host_ranks]
    answers = group.gather(
        "commits/held", _local_checkpoints(folder) if group.rank in first_ranks else {}, LONG_SECONDS
    )
    files_by_rank = {rank: {name: LocalFiles(*one) for name, one in answers[rank].items()} for rank in first_ranks}
    names = sorted(set().union(*files_by_rank.values()), reverse=True)
    complete = [name for name in names if _is_complete(name, files_by_rank)]
    shared = [
        name for name in complete if all(_is_complete(name, {rank: files}) for rank, files in files_by_rank.items())
    ]
    newest_complete = next(iter(complete), "")
    if newest_complete and newest_complete not in shared:
        copies = {rank: files.get(newest_complete) for rank, files in files_by_rank.items()}
        if _send(strategy, folder / newest_complete, copies):
            shared.append(newest_complete)
    ignored = [name for name in names if name > max(shared, default="")]
    if ignored and strategy.is_chief:
        _log.warning(
            "Ignoring the commit %s: the hosts of this start do not have all of its files.", ", ".join(ignored)
        )
    return shared


def _hosts_or_processes(group: Group, folder: Path) -> list[list[int]]:
    """Same as `hosts`; if a host cannot create the directory, each process counts as a host without files."""
    try:
        return hosts(group, folder)
    except InputError:
        return [[rank] for rank in range(group.size)]


def _local_checkpoints(folder: Path) -> dict[str, LocalFiles]:
    files = {}
    with contextlib.suppress(OSError):
        clean_partial(folder)
    for path in newest(folder):
        with contextlib.suppress(OSError, TfdistError):  # of the manifest: another host may have it
            files[path.name] = Checkpoint.held(path)
    return files


def _is_complete(name: str, files_by_rank: Mapping[int, Mapping[str, LocalFiles]]) -> bool:
    """Returns whether the hosts together have all files of an in-memory checkpoint."""
    copies = [files[name] for files in files_by_rank.values() if name in files]
    return len({copy.manifest for copy in copies}) == 1 and all(
        any(file in copy.intact for copy in copies) for file in copies[0].sizes
    )


def _send(strategy: Strategy, path: Path, files_by_rank: Mapping[int, LocalFiles | None]) -> bool:
    """Sends each missing file from a host that has it to those that do not; returns whether all have them now."""
    transfer = ByteTransfer(strategy)
    sizes = next(one for one in files_by_rank.values() if one).sizes
    own_rank, failure, is_new = strategy.group.rank, "", not path.exists()
    for file, size in sizes.items():
        source_rank, *others = [rank for rank, one in files_by_rank.items() if one and file in one.intact]
        lacking_ranks = files_by_rank.keys() - {source_rank, *others}
        for begin in range(0, size, transfer.piece) if lacking_ranks else ():
            data = np.zeros(min(transfer.piece, size - begin) * (own_rank == source_rank), np.uint8)
            if own_rank == source_rank:
                with open(path / file, "rb") as source:
                    source.seek(begin)
                    source.readinto(data.data)
            piece = transfer.to_all(data)[source_rank]
            if own_rank in lacking_ranks and not failure:
                failure = _write_piece(path / file, piece, begin, size)
    failures = strategy.group.gather("commits/shared", failure, LONG_SECONDS)
    for rank, error in enumerate(failures):
        if error and own_rank == 0:
            _log.warning("Rank %d cannot write the commit %s, which the others have: %s.", rank, path.name, error)
    if failure and is_new:
        shutil.rmtree(path, ignore_errors=True)
    return not any(failures)


def _write_piece(path: Path, piece: np.ndarray, start: int, size: int) -> str:
    """Writes a piece of a file, which is renamed after the last piece; returns the error, or ""."""
    partial = path.with_name(f".{path.name}.arriving")
    try:
        path.parent.mkdir(exist_ok=True)
        with open(partial, "r+b" if start else "wb") as file:
            file.seek(start)
            file.write(piece.data)
        if start + piece.size == size:
            partial.replace(path)
    except OSError as error:
        return f"{path.parent} ({error.strerror})"
    return ""


class Saved(NamedTuple):
    """The state of a run at one step.

    Attributes:
      step: number of updates done.
      seed: seed of the run.
      parts: copies of what this process writes.
      values: state other than tensors, as JSON.
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
        super().__init__(strategy.group, *args)
        self._fails = False
        self._hosts = hosts(self._group, Path(str(self.directory)))
        self._is_first = any(host[0] == self._group.rank for host in self._hosts)
        self._transfer = ByteTransfer(strategy) if len(self._hosts) > 1 else None

    @property
    def survives_host_loss(self) -> bool:
        """Whether the checkpoint survives the loss of a host."""
        return self._transfer is not None

    def start(self, saved: Saved) -> None:
        """See base class."""
        super().start(self._spread(saved, self._transfer) if self._transfer else saved)

    def _spread(self, saved: Saved, transfer: ByteTransfer) -> Saved:
        replicated = saved.state.replicated()
        own = [part for part in saved.parts if part.name not in replicated]
        copies = transfer.to_one(shard_bytes(own), copy_holder(self._group.rank, self._hosts))
        placement = HostPlacement(
            self._hosts, saved.state.replicated_parts(saved.parts) if self._is_first else (), copies
        )
        return saved._replace(parts=own, over=placement)

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
