"""Writes a checkpoint with all processes, atomically: it exists completely or not at all, and all processes know which.

    rank 0: a partial directory -> every rank: its shard and its index, as files -> rank 0: the manifest, one rename

Shards and indices go through the storage; the processes only exchange small messages, one after each stage. If
there is no directory shared by all ranks, the first rank of each host does the work of rank 0 there.
"""

import base64
import contextlib
import dataclasses
import json
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from tfdist.checkpoint.format import directory as places
from tfdist.checkpoint.format import files, json_validation, manifest
from tfdist.checkpoint.format.entries import Index, merged
from tfdist.checkpoint.format.shard import Part, shard_name, write_shard
from tfdist.coordination import Group, Json
from tfdist.errors import CheckpointError
from tfdist.storage import AnyPath, StoragePath, path_of, storage_of

# Writes a checkpoint to several hosts without a shared directory.
# Each host has the manifest, the files of its own ranks, and copies of files of others. Replicated data is in one file that
# each host writes for itself, so that it is not sent. The parts of a single rank are in a file on its host, and on the next
# host, to which the bytes are sent. So if one host is lost, the others have everything.

_MESSAGE = 1 << 19  # characters per message of a group, without its framing
_MAX_ERROR_LENGTH = 500  # of a rank's error message
_MAX_ERRORS = 3  # number of ranks whose errors are in a message


@dataclasses.dataclass(frozen=True)
class HostPlacement:
    """Distribution of a checkpoint's files over hosts without a shared directory.

    Attributes:
      hosts: for each directory, the ranks that share it, in order; rank 0's first.
      replicated: on the first rank of a host, the replicated parts.
      copies: contents of files of ranks on other hosts that this rank writes, by rank; see `shard_bytes`.
    """

    hosts: Sequence[Sequence[int]]
    replicated: Sequence[Part] = ()
    copies: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)


def copy_holder(rank: int, hosts: Sequence[Sequence[int]]) -> int:
    """Returns the rank on the next host that stores a copy of this rank's file."""
    own = next(number for number, host in enumerate(hosts) if rank in host)
    there = hosts[(own + 1) % len(hosts)]
    return there[hosts[own].index(rank) % len(there)]


class MultiHost:
    """Writing by ranks that do not share a directory; their indices are exchanged through the group."""

    def __init__(self, group: Group, over: HostPlacement, flags: Json, values: Json):
        self._group = group
        self._words = {"flags": flags, "values": values} if group.rank == 0 else {}
        self._over = over
        self._firsts = [host[0] for host in over.hosts]
        self._text = ""  # indices of this rank's files, and rank 0's flags and values
        self._texts: list[str] = []  # of all ranks
        self._said: list[Json] = []

    @property
    def is_first(self) -> bool:
        """Whether this rank does the work that is done once per directory."""
        return self._group.rank in self._firsts

    def write(self, partial: StoragePath, parts: Sequence[Part]) -> None:
        """Writes this rank's files; the file of replicated parts has the number after those of the ranks.

        Raises:
          ValueError, TypeError: on rank 0, if flags or values are not JSON.
        """
        for rank, data in self._over.copies.items():
            files.write(partial / shard_name(rank), data.data)
        numbered = ((self._group.rank, parts), (self._group.size, self._over.replicated))
        own, replicated = (
            manifest.dump_index(write_shard(partial, number, own_parts)) for number, own_parts in numbered
        )
        # Encoded here, because a rank that failed in `exchange` would leave the others waiting.
        self._text = _packed(self._words | {"own": own, "replicated": replicated})

    def exchange(self, name: str, deadline: float) -> None:
        """Exchanges the indices of all ranks, and rank 0's flags and values; every rank must call it.

        It fails on all ranks or on none, so it must not be a stage, where a failed rank would report by another gather.
        """
        self._texts = _gathered(self._group, name, self._text, deadline)

    def decode(self) -> None:
        """Decodes the exchanged indices.

        Raises:
          ValueError: on rank 0, if parts that should be replicated differ between hosts.
        """
        self._said = list(map(_unpacked, self._texts))
        if self._group.rank == 0:
            for rank in self._firsts[1:]:
                self._check(rank)

    def _check(self, rank: int) -> None:
        expected, received = (self._said[one]["replicated"]["tensors"] for one in (0, rank))
        differs = [name for name in {**expected, **received} if expected.get(name) != received.get(name)]
        if differs:
            raise ValueError(f"{differs[0]} on rank {rank} differs from that on rank 0, see --check_sync_every")

    def content(self) -> tuple[Index, Json, Json]:
        """Returns the index of all files, and rank 0's flags and values."""
        first = self._said[0]
        indices = [first["replicated"], *(words["own"] for words in self._said)]
        return merged(map(json_validation.index, indices)), first["flags"], first["values"]


def _packed(value: Json) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpacked(text: str) -> Json:
    return json.loads(zlib.decompress(base64.b64decode(text)))


def _gathered(group: Group, name: str, text: str, deadline: float) -> list[str]:
    """Like `group.gather`, split into several messages: an index has a hash for every 4 MiB."""
    pieces = [text[start : start + _MESSAGE] for start in range(0, len(text), _MESSAGE)]
    texts = [""] * group.size
    for number in range(max(count or 0 for count in group.gather(f"{name} messages", len(pieces), deadline))):
        piece = pieces[number] if number < len(pieces) else ""
        for rank, more in enumerate(group.gather(f"{name} {number}", piece, deadline)):
            texts[rank] += more or ""
    return texts


def commit(
    group: Group,
    directory: AnyPath,
    parts: Sequence[Part],
    *,
    step: int,
    seed: int,
    flags: Mapping[str, Json],
    values: Json,
    keep: int,
    kept: Collection[int] = (),
    noun: str = "checkpoint",
    deadline: float = 3600.0,
    over: HostPlacement | None = None,
) -> StoragePath:
    """Writes a checkpoint and returns when it is on disk; every rank must call it, from any thread.

    Args:
      group: the processes that write together.
      directory: directory of the run's checkpoints, shared by all ranks unless `over` is given;
        created if necessary. Only one job may write there (see `lock`), one checkpoint at a time: other partial
        checkpoints are removed.
      parts: this rank's blocks. The blocks of all ranks must tile each tensor.
      step: number of updates done; a checkpoint of the same step is replaced.
      seed: seed of the run.
      flags: resolved flags of the run by name, as JSON; rank 0's are used.
      values: other values of the state, as JSON without nan and inf; rank 0's are used.
      keep: number of checkpoints to keep, at least 1: the newest, and always the one just written.
      kept: steps of further checkpoints to keep.
      noun: name of a checkpoint in messages; checkpoints with different nouns may be written concurrently, in different
        directories.
      deadline: seconds for each stage, by which the slowest rank may be behind the fastest.
      over: hosts to which the files are distributed, if no directory is shared by all ranks; `parts` are then those
        that only this rank has.

    Returns:
      Path of the checkpoint.

    Raises:
      CheckpointError: a rank failed; the same on every rank. Existing checkpoints are unchanged.
      PeerLostError: a rank is lost or did not call in time.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1. Received: keep={keep}.")
    home = path_of(directory)
    partial, final = places.partial(home, step), home / places.name(step)
    multi_host = MultiHost(group, over, flags, values) if over else None
    writer = multi_host or _SharedDirectory(group, partial, flags, values)
    stages = _Stages(group, noun, places.name(step), deadline)

    def publish() -> None:
        index, shared_flags, shared_values = writer.content()
        content = manifest.Manifest(step, seed, shared_flags, shared_values, index)
        files.write(partial / manifest.NAME, manifest.dump(content))
        places.publish(partial, final)

    try:
        stages.run("begin", lambda: places.make_partial(home, step), writer.is_first)
        stages.run("shards", lambda: writer.write(partial, parts))
        if multi_host:
            multi_host.exchange(f"{noun} {final.name} index", deadline)
            stages.run("indices", multi_host.decode)
        stages.run("manifest", publish, writer.is_first)
        # After it has been published in all directories.
        stages.run("prune", lambda: places.prune(home, keep, final, kept), writer.is_first)
    except BaseException:
        if writer.is_first:  # the next write removes files that cannot be removed now
            with contextlib.suppress(OSError):
                storage_of(partial).remove_directory(partial)
        raise
    return final


class _Stages:
    """Runs the stages of a write on each rank, and reports failures to all ranks."""

    def __init__(self, group: Group, noun: str, name: str, deadline: float):
        self._group = group
        self._noun = noun
        self._name = name
        self._deadline = deadline

    def run(self, stage: str, action: Callable[[], object], takes_part: bool = True) -> None:
        """Runs the action if this rank takes part; returns when every rank has completed the stage."""
        failure: Exception | None = None
        try:
            if takes_part:
                action()
        except Exception as error:  # any error, because the others wait for a message
            failure = error
        message = None if failure is None else _words(failure)
        answers = self._group.gather(f"{self._noun} {self._name} {stage}", message, self._deadline)
        failed = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
        if failed:
            raise CheckpointError(_message(self._noun, self._name, failed)) from failure


class _SharedDirectory:
    """Writing by ranks that share a directory; their indices are files in it."""

    def __init__(self, group: Group, partial: StoragePath, flags: Json, values: Json):
        self._group, self._partial, self._flags, self._values = group, partial, flags, values
        self.is_first = group.rank == 0

    def write(self, partial: StoragePath, parts: Sequence[Part]) -> None:
        index = write_shard(partial, self._group.rank, parts)
        files.write(_index_file(partial, self._group.rank), manifest.sealed(manifest.dump_index(index)))

    def content(self) -> tuple[Index, Json, Json]:
        return _merge_indices(self._partial, self._group), self._flags, self._values


def _index_file(partial: StoragePath, rank: int) -> StoragePath:
    return partial / f"index-{rank:05d}.json"


def _merge_indices(partial: StoragePath, group: Group) -> Index:
    """Merges the index files of all ranks, and removes them."""
    storage, index_files = storage_of(partial), []
    for rank in range(group.size):
        file = _index_file(partial, rank)
        if storage.exists(file):
            index_files.append(file)
        elif rank not in group.departed:
            raise FileNotFoundError(f"the part of rank {rank} is missing: there is no {file}")
    index = merged(json_validation.index(manifest.unsealed(files.read(file))) for file in index_files)
    for name, size_there in index.shards.items():
        info = storage.info(partial / name)
        if info is None or info.size != size_there:
            raise ValueError(f"{partial / name} does not have {size_there} bytes")
    for file in index_files:
        storage.remove(file)
    return index


def _words(error: Exception) -> str:
    text = str(error) if isinstance(error, (OSError, CheckpointError, ValueError)) else repr(error)
    return " ".join(text.split())[:_MAX_ERROR_LENGTH]


def _message(noun: str, name: str, failed: Mapping[int, str]) -> str:
    errors = [f"rank {rank}: {error}" for rank, error in list(failed.items())[:_MAX_ERRORS]]
    more = [f"and {len(failed) - _MAX_ERRORS} more ranks"] if len(failed) > _MAX_ERRORS else []
    return (
        f"Every rank must write its part of a {noun}. Received, for {name}: {'; '.join([*errors, *more])}. "
        f"Free space, or repair the directory, which all ranks share; earlier {noun}s are unchanged."
    )


class BackgroundWriter:
    """A thread that writes at most one checkpoint at a time.

    It is a daemon thread: a program must wait for data that has to be on disk.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Starts a write after the previous one has completed.

        Args:
          write: function that writes; its exception is raised by `wait` or the next `start`.

        Raises:
          BaseException: exception of the previous write; then nothing is started.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written.

        Raises:
          BaseException: exception of the write, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:  # raised in `wait`
            self._error = error
