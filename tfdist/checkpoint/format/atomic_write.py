"""Writes a checkpoint with all processes, atomically: it exists completely or not at all, and all processes know which.

    rank 0: a partial directory -> every rank: its shard and its index, as files -> rank 0: the manifest, one rename

Shards and indices go through the storage; the processes only exchange small messages, one after each stage. If
there is no directory shared by all ranks, the first rank of each host does the work of rank 0 there (`multi_host.py`).
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence

from tfdist.checkpoint.format import directory as places
from tfdist.checkpoint.format import entries, files, json_validation, manifest
from tfdist.checkpoint.format.entries import Index
from tfdist.checkpoint.format.manifest import Manifest
from tfdist.checkpoint.format.multi_host import HostPlacement, MultiHost
from tfdist.checkpoint.format.part import Part
from tfdist.checkpoint.format.shard import write_shard
from tfdist.coordination import Group, Json
from tfdist.errors import CheckpointError
from tfdist.storage import AnyPath, StoragePath, path_of, storage_of

_LONGEST = 500  # of a rank's error message
_MOST = 3  # number of ranks whose errors are in a message


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
      noun: what it is called in messages; checkpoints with different nouns may be written concurrently, in different
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
    partial, whole = places.partial(home, step), home / places.name(step)
    spread = MultiHost(group, over, flags, values) if over else None
    place = spread or _InOne(group, partial, flags, values)
    stages = _Stages(group, noun, places.name(step), deadline)

    def publish() -> None:
        index, said_flags, said_values = place.content()
        content = Manifest(step, seed, said_flags, said_values, index)
        files.write(partial / manifest.NAME, manifest.dump(content))
        places.publish(partial, whole)

    try:
        stages.run("begin", lambda: places.make_partial(home, step), place.is_first)
        stages.run("shards", lambda: place.write(partial, parts))
        if spread:
            spread.exchange(f"{noun} {whole.name} index", deadline)
            stages.run("indices", spread.understand)
        stages.run("manifest", publish, place.is_first)
        # After it has been published in all directories.
        stages.run("prune", lambda: places.prune(home, keep, whole, kept), place.is_first)
    except BaseException:
        if place.is_first:  # what cannot be removed is removed by the next write
            with contextlib.suppress(OSError):
                storage_of(partial).remove_directory(partial)
        raise
    return whole


class _Stages:
    """Runs the stages of a write on each rank, and reports failures to all ranks."""

    def __init__(self, group: Group, noun: str, name: str, deadline: float):
        self._group = group
        self._noun = noun
        self._name = name
        self._deadline = deadline

    def run(self, stage: str, action: Callable[[], object], does: bool = True) -> None:
        """Runs the action if this rank takes part; returns when every rank has completed the stage."""
        failure: Exception | None = None
        try:
            if does:
                action()
        except Exception as error:  # any error, because the others wait for a message
            failure = error
        said = None if failure is None else _words(failure)
        everyone = self._group.gather(f"{self._noun} {self._name} {stage}", said, self._deadline)
        failed = {rank: words for rank, words in enumerate(everyone) if words is not None}
        if failed:
            raise CheckpointError(_message(self._noun, self._name, failed)) from failure


class _InOne:
    """Writing by ranks that share a directory; their indices are files in it."""

    def __init__(self, group: Group, partial: StoragePath, flags: Json, values: Json):
        self._group, self._partial, self._flags, self._values = group, partial, flags, values
        self.is_first = group.rank == 0

    def write(self, partial: StoragePath, parts: Sequence[Part]) -> None:
        index = write_shard(partial, self._group.rank, parts)
        files.write(_index_file(partial, self._group.rank), manifest.sealed(manifest.dump_index(index)))

    def content(self) -> tuple[Index, Json, Json]:
        return _fold(self._partial, self._group.size), self._flags, self._values


def _index_file(partial: StoragePath, rank: int) -> StoragePath:
    return partial / f"index-{rank:05d}.json"


def _fold(partial: StoragePath, size: int) -> Index:
    """Merges the index files of all ranks, and removes them."""
    storage = storage_of(partial)
    own = [_index_file(partial, rank) for rank in range(size)]
    for rank, file in enumerate(own):
        if not storage.exists(file):
            raise FileNotFoundError(f"the part of rank {rank} is missing: there is no {file}")
    index = entries.merged(json_validation.index(manifest.unsealed(files.read(file))) for file in own)
    for name, size_there in index.shards.items():
        found = storage.info(partial / name)
        if found is None or found.size != size_there:
            raise ValueError(f"{partial / name} does not have {size_there} bytes")
    for file in own:
        storage.remove(file)
    return index


def _words(error: Exception) -> str:
    text = str(error) if isinstance(error, (OSError, CheckpointError, ValueError)) else repr(error)
    return " ".join(text.split())[:_LONGEST]


def _message(noun: str, name: str, failed: Mapping[int, str]) -> str:
    words = [f"rank {rank}: {said}" for rank, said in list(failed.items())[:_MOST]]
    more = [f"and {len(failed) - _MOST} more ranks"] if len(failed) > _MOST else []
    return (
        f"Every rank must write its part of a {noun}. Received, for {name}: {'; '.join([*words, *more])}. "
        f"Free space, or repair the directory, which all ranks share; earlier {noun}s are unchanged."
    )
