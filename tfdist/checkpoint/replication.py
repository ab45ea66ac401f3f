"""Writes durable and in-memory checkpoints in the background, and replicates in-memory checkpoints to other hosts."""

import contextlib
import errno
import itertools
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.checkpoint.format import (
    Checkpoint,
    CheckpointError,
    HostPlacement,
    LocalFiles,
    TensorBlock,
    complete_checkpoints,
    copy_holder,
    remove,
    remove_remnants,
    shard_bytes,
    write_checkpoint,
)
from tfdist.checkpoint.run_variables import RunVariables
from tfdist.coordination import Group
from tfdist.coordination.group import LONG_SECONDS
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, TfdistError
from tfdist.storage import path_of

_MAX_BYTES_AT_ONCE = 64 << 20  # sum over all processes, because an engine may deliver all bytes to each process
_log = logging.getLogger(__name__)
_HOST_ID_FILE = ".host"  # a file that distinguishes directories of the same name on different hosts
_READ_ATTEMPTS, _PAUSE_SECONDS = 500, 0.01


class ByteTransfer:
    """Sends bytes between processes, between calls of the compiled loop.

    All processes must make the same calls from their main threads. Each process sends from its first replica.

    Attributes:
      max_bytes: maximum number of bytes that a process sends at once.
    """

    def __init__(self, strategy: Strategy):
        """Initializes the transfer without compiling anything; raises `InputError` as `check_can_transfer` does."""
        check_can_transfer(strategy)
        self._strategy = strategy
        self._word_dtype = strategy.collectives.dtypes.packed
        self._local_replicas = len(strategy.local_replicas)
        self.max_bytes = max(_MAX_BYTES_AT_ONCE // strategy.replicas, 1 << 10)
        self._function: Any = None  # traced by the first call

    def send(self, data: np.ndarray, process: int) -> dict[int, np.ndarray]:
        """Sends `data`, uint8 of any length, from each process to one other process.

        Returns the bytes that other processes have sent to this process, by rank.
        """
        messages = self._strategy.group.gather("byte_transfer/sizes", [data.size, process], LONG_SECONDS)
        own_rank = self._strategy.cluster.rank
        buffers = {rank: np.empty(n, np.uint8) for rank, (n, receiver) in enumerate(messages) if receiver == own_rank}
        for start in range(0, max(size for size, _ in messages), self.max_bytes):
            stream = self._transmit(data[start : start + self.max_bytes], process)
            for buffer in buffers.values():
                piece = buffer[start : start + self.max_bytes]
                piece[:] = stream[: piece.size]
                stream = stream[self._padded_size(piece.size) :]
        return buffers

    def _transmit(self, data: np.ndarray, process: int) -> np.ndarray:
        padded_data = np.zeros(self._padded_size(data.size), np.uint8)
        padded_data[: data.size] = data
        words = padded_data.view(self._word_dtype.as_numpy_dtype)
        splits = np.zeros(self._strategy.replicas, np.int32)
        splits[process * self._local_replicas] = words.size
        if self._function is None:
            specs = tf.TensorSpec([None], self._word_dtype), tf.TensorSpec([self._strategy.replicas], tf.int32)
            compiled: Any = self._strategy.compiled(lambda *args: self._strategy.run(self._exchange, *args))
            self._function = compiled.get_concrete_function(*specs)
        outputs = self._function(tf.constant(words), tf.constant(splits))
        return np.asarray(self._strategy.local(outputs)[0]).view(np.uint8)

    def _padded_size(self, size: int) -> int:
        return -(-size // self._word_dtype.size) * self._word_dtype.size

    def _exchange(self, data: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
        collectives = self._strategy.collectives
        is_first = tf.cast(tf.equal(collectives.rank % self._local_replicas, 0), tf.int32)
        message = data[: tf.size(data) * is_first]
        return collectives.all_to_all([message], splits=splits * is_first, name="byte_transfer")[0]


def can_transfer(strategy: Strategy) -> bool:
    """Returns whether the processes of a strategy can send each other byte arrays of dynamic size."""
    # If the job has other collectives, a replica spans several processes; workers of parameter servers may be lost.
    return not (strategy.compiles_replicas or strategy.remote) and strategy.job_collectives is strategy.collectives


def check_can_transfer(strategy: Strategy) -> None:
    """Raises `InputError` unless `can_transfer` is true for a strategy."""
    if not can_transfer(strategy):
        raise InputError(
            "In-memory checkpoints of hosts without a shared directory are copied with the strategy's collectives. "
            f"Received: {strategy.name}, which has no collectives between processes. Set --commit_dir to a directory that "
            "all hosts share, or remove --commit_every."
        )


def ranks_by_directory(group: Group, directory: Path) -> list[list[int]]:
    """Returns the ranks grouped by the directory that they see under a path; every rank must call this.

    There is one group per host or shared file system. Creates the directory if necessary, with a small file in it.

    Raises:
      InputError: on all ranks, if the directory is not writable.
    """
    host_id = failure = ""
    try:
        host_id = _host_id(directory)
    except OSError as error:
        failure = f"{directory} ({error.strerror})"
    answers = group.gather("commits/hosts", [host_id, failure], LONG_SECONDS)
    ranks_by_host: dict[str, list[int]] = {}
    for rank, (host_id, failure) in ((rank, answer) for rank, answer in enumerate(answers) if answer):
        if failure:
            raise InputError(
                f"In-memory checkpoints need a writable directory. Received, on rank {rank}: {failure}. Specify another "
                "--commit_dir."
            )
        ranks_by_host.setdefault(host_id, []).append(rank)
    return list(ranks_by_host.values())


def _host_id(directory: Path) -> str:
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / _HOST_ID_FILE
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        file.write(secrets.token_hex(8))
    for _ in range(_READ_ATTEMPTS):  # another process may have created the file and not written it yet
        if text := path.read_text():
            return text
        time.sleep(_PAUSE_SECONDS)
    raise OSError(errno.EIO, f"the file {_HOST_ID_FILE} in it is empty")


def replicate_newest_checkpoint(strategy: Strategy, folder: Path) -> list[str] | None:
    """Copies the newest in-memory checkpoint in `folder` that is complete across all hosts to each host.

    Every process must call this before reading an in-memory checkpoint.

    Returns:
      Names of the in-memory checkpoints that are complete on every host; None, without examining them, if all processes
        share a directory or cannot send files.
    """
    group = strategy.group
    host_ranks = [[rank] for rank in range(group.size)]
    if group.size > 1:
        with contextlib.suppress(InputError):  # a host that cannot create the directory has no files in it
            host_ranks = ranks_by_directory(group, folder)
    if len(host_ranks) == 1 or not can_transfer(strategy):
        return None
    first_ranks = [host[0] for host in host_ranks]
    local_checkpoints = _local_checkpoints(folder) if group.rank in first_ranks else {}
    answers = group.gather("commits/held", local_checkpoints, LONG_SECONDS)
    files_by_rank = {r: {name: LocalFiles(*fields) for name, fields in answers[r].items()} for r in first_ranks}
    names = sorted(set().union(*files_by_rank.values()), reverse=True)
    complete_names = [name for name in names if _is_complete(name, files_by_rank)]
    hosts_files = [{rank: files} for rank, files in files_by_rank.items()]
    shared_names = [name for name in complete_names if all(_is_complete(name, files) for files in hosts_files)]
    newest_complete = next(iter(complete_names), "")
    if newest_complete and newest_complete not in shared_names:
        copies = {rank: files.get(newest_complete) for rank, files in files_by_rank.items()}
        if _send(strategy, folder / newest_complete, copies):
            shared_names.append(newest_complete)
    ignored_names = [name for name in names if name > max(shared_names, default="")]
    if ignored_names and strategy.is_chief:
        _log.warning(
            "Ignoring the in-memory checkpoint %s: the hosts of this attempt do not have all of its files.",
            ", ".join(ignored_names),
        )
    return shared_names


def _local_checkpoints(folder: Path) -> dict[str, LocalFiles]:
    files = {}
    with contextlib.suppress(OSError):
        remove_remnants(folder)
    for path in complete_checkpoints(folder):
        with contextlib.suppress(OSError, TfdistError):  # if the manifest is missing here, another host may have it
            files[path.name] = Checkpoint.local_files(path)
    return files


def _is_complete(name: str, files_by_rank: Mapping[int, Mapping[str, LocalFiles]]) -> bool:
    copies = [files[name] for files in files_by_rank.values() if name in files]
    is_same = len({copy.manifest_hash for copy in copies}) == 1
    return is_same and all(any(file in copy.intact_names for copy in copies) for file in copies[0].sizes)


def _send(strategy: Strategy, path: Path, files_by_rank: Mapping[int, LocalFiles | None]) -> bool:
    """Sends each file from a host that has it to the hosts that do not; returns whether all hosts have all files."""
    transfer = ByteTransfer(strategy)
    sizes = next(files for files in files_by_rank.values() if files).sizes
    own_rank, failure, is_new = strategy.group.rank, "", not path.exists()
    for file, size in sizes.items():
        owners = [rank for rank, files in files_by_rank.items() if files and file in files.intact_names]
        source_rank, missing_ranks = owners[0], files_by_rank.keys() - {*owners}
        for receiver, begin in itertools.product(sorted(missing_ranks), range(0, size, transfer.max_bytes)):
            data = np.zeros(min(transfer.max_bytes, size - begin) * (own_rank == source_rank), np.uint8)
            if own_rank == source_rank:
                with open(path / file, "rb") as source:
                    source.seek(begin)
                    source.readinto(data.data)
            pieces = transfer.send(data, receiver)
            if own_rank == receiver and not failure:
                failure = _write_piece(path / file, pieces[source_rank], begin, size)
    failures = strategy.group.gather("commits/shared", failure, LONG_SECONDS)
    for rank, error in enumerate(failures):
        if error and own_rank == 0:
            _log.warning("Rank %d cannot write the in-memory checkpoint %s: %s.", rank, path.name, error)
    if failure and is_new:
        shutil.rmtree(path, ignore_errors=True)
    return not any(failures)


def _write_piece(path: Path, piece: np.ndarray, start: int, size: int) -> str:
    """Writes a piece of a file, which is renamed after the last piece; returns the error message, or ""."""
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


class RunSnapshot(NamedTuple):
    """The state of a run at one step."""

    step: int  # number of completed updates
    seed: int  # seed of the run
    parts: Sequence[TensorBlock]  # copies of the blocks that this process writes
    values: Any  # state other than tensors, as JSON
    state: RunVariables  # variables from which the blocks were copied
    placement: HostPlacement | None = None  # placement of the files on hosts; None if all processes share a directory
    keep_steps: Sequence[int] = ()  # steps of further checkpoints to keep


class Tier:
    """Writes a run's checkpoints of one kind to a directory, in a thread, one at a time.

    Attributes:
      last_step: step of the last checkpoint whose write has started and not failed.
    """

    noun = "checkpoint"
    level = logging.INFO  # log level of the message about a complete checkpoint

    def __init__(self, group: Group, directory: str, keep: int, flags: Mapping[str, Any]):
        """Initializes the tier without writing; see `Checkpoints` for the arguments."""
        self._group = group
        self.directory = path_of(directory)
        self._keep = keep
        self._flags = flags
        self.last_step: int | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, snapshot: RunSnapshot) -> None:
        """Starts writing a checkpoint; `wait` must have been called for the previous one."""
        self.last_step = snapshot.step
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, snapshot: RunSnapshot) -> None:
        try:
            self._write(snapshot)
        except BaseException as error:  # raised in `wait`
            self._error = error

    def wait(self) -> None:
        """Waits for the write; raises its exception once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait_ignoring_errors(self) -> None:
        """Waits for the write, ignoring its errors because another error is being raised."""
        with contextlib.suppress(Exception):
            Tier.wait(self)

    def _write(self, snapshot: RunSnapshot) -> None:
        contents = {name: value for name, value in snapshot._asdict().items() if name != "state"}
        path = write_checkpoint(
            self._group, self.directory, flags=self._flags, keep=self._keep, noun=self.noun, **contents
        )
        if self._group.rank == 0:
            _log.log(self.level, "Saved step %d in %s.", snapshot.step, path)


class DurableTier(Tier):
    """Writes durable checkpoints; a failure is reported to all processes."""

    def __init__(self, *args: Any, strict: bool, on_failure: Callable[[], object]):
        super().__init__(*args)
        self._strict = strict
        self._on_failure = on_failure

    def _write(self, snapshot: RunSnapshot) -> None:
        try:
            super()._write(snapshot)
        except CheckpointError:
            if self._group.rank == 0:
                self._on_failure()
            raise

    def wait(self, strict: bool = False) -> None:
        """See base class. A failed write raises an error on all processes or, if not strict, logs a warning."""
        try:
            super().wait()
        except CheckpointError as error:
            self.last_step = None
            if strict or self._strict:
                raise
            if self._group.rank == 0:
                _log.warning("%s The run continues, and tries again at the next checkpoint.", error)


class InMemoryTier(Tier):
    """Writes in-memory checkpoints; only the first of consecutive failures is logged.

    If hosts do not share a directory, each host stores the replicated state. State that only one process has is stored on
    its host, and copied to the next host while training waits.

    Attributes:
      survives_host_loss: whether a checkpoint survives the loss of a host.
    """

    noun = "in-memory checkpoint"
    level = logging.DEBUG

    def __init__(self, strategy: Strategy, *args: Any):
        super().__init__(strategy.group, *args)
        self._has_failed = False
        self._hosts = ranks_by_directory(self._group, Path(str(self.directory)))
        self._is_first = any(host[0] == self._group.rank for host in self._hosts)
        self._transfer = ByteTransfer(strategy) if len(self._hosts) > 1 else None
        self.survives_host_loss = self._transfer is not None

    def start(self, snapshot: RunSnapshot) -> None:
        if self._transfer:
            state, parts, replicated = snapshot.state, snapshot.parts, snapshot.state.replicated_variables()
            local_parts = [part for part in parts if part.name not in replicated]
            copies = self._transfer.send(shard_bytes(local_parts), copy_holder(self._group.rank, self._hosts))
            placement = HostPlacement(self._hosts, state.replicated_parts(parts) if self._is_first else (), copies)
            snapshot = snapshot._replace(parts=local_parts, placement=placement)
        super().start(snapshot)

    def clear(self) -> None:
        """Removes all checkpoints, to free their memory."""
        if not self._is_first:
            return
        try:
            for path in complete_checkpoints(self.directory):
                remove(path)
        except OSError as error:
            _log.warning("In-memory checkpoints in %s could not be removed (%s).", self.directory, error.strerror)

    def _write(self, snapshot: RunSnapshot) -> None:
        try:
            super()._write(snapshot)
            self._has_failed = False
        except CheckpointError as error:
            if self._group.rank == 0 and not self._has_failed:
                _log.warning("%s The run continues, and tries again at the next in-memory checkpoint.", error)
            self._has_failed = True
