"""All processes write one checkpoint: it is there for all, or for nobody, and all know which.

    rank 0: a partial directory -> every rank: its shard and its index, in files -> rank 0: the manifest, one rename

Shards and indices go through the file system; between the processes only small words travel, one after each stage. Where no
directory is all ranks', what rank 0 does, the first rank of each host does there (`spread.py`).
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfdist.checkpoint.storage import directory as places
from tfdist.checkpoint.storage import entries, files, json_validation, manifest
from tfdist.checkpoint.storage.entries import Index
from tfdist.checkpoint.storage.manifest import Manifest
from tfdist.checkpoint.storage.multi_host import MultiHost, Spread
from tfdist.checkpoint.storage.part import Part
from tfdist.checkpoint.storage.shard import write_shard
from tfdist.coordination import Group, Json
from tfdist.errors import CheckpointError

_LONGEST = 500  # of what a rank says of its failure
_MOST = 3  # ranks whose words are in a message


def commit(
    group: Group,
    directory: str | os.PathLike[str],
    parts: Sequence[Part],
    *,
    step: int,
    seed: int,
    flags: Mapping[str, Json],
    values: Json,
    keep: int,
    noun: str = "checkpoint",
    deadline: float = 3600.0,
    over: Spread | None = None,
) -> Path:
    """Writes a checkpoint; every rank calls it, from any thread. It returns when the checkpoint is on the disk.

    Args:
      group: the processes that write together.
      directory: of the run's checkpoints, on a file system that all ranks share, unless there is `over`; it is made if need
        be. One job writes there (see `lock`), one checkpoint at a time: what else has begun there is removed.
      parts: what this rank has. The parts of all ranks tile each tensor.
      step: how many steps the state has seen; a checkpoint of the same step is replaced.
      seed: of the run.
      flags: the run's resolved flags by name, as JSON. Rank 0's count.
      values: what else belongs to the state, as JSON, without nan and inf. Rank 0's count.
      keep: how many checkpoints stay, at least 1; the newest steps do, and the one just written.
      noun: what it is called in messages; those of two nouns may be written at one time, in two directories.
      deadline: in seconds, for each of its stages, in which the slowest rank may be behind the fastest.
      over: the hosts in whose directories the files lie, if there is none that all ranks share; the parts are then those that
        this rank alone holds.

    Returns:
      The checkpoint's path.

    Raises:
      CheckpointError: a rank could not do its part; the same on every rank. What was there before is as it was.
      PeerLostError: a rank is lost or did not come.
    """
    if keep < 1:
        raise ValueError(f"At least one checkpoint must stay. Received: keep={keep}.")
    home = Path(directory)
    spread = MultiHost(group, over, flags, values) if over else None
    place = spread or _InOne(group, flags, values)
    partial, whole = places.partial(home, step), home / places.name(step)
    stages = _Stages(group, noun, places.name(step), deadline)

    def publish() -> None:
        index, said_flags, said_values = place.content()
        content = Manifest(step, seed, said_flags, said_values, index)
        _write(partial / manifest.NAME, manifest.dump(content))
        places.publish(partial, whole)

    try:
        stages.run("begin", lambda: places.make_partial(home, step), place.is_first)
        stages.run("shards", lambda: place.write(partial, parts))
        if spread:
            spread.exchange(f"{noun} {whole.name} index", deadline)
            stages.run("indices", spread.understand)
        stages.run("manifest", publish, place.is_first)
        stages.run("prune", lambda: places.prune(home, keep, whole), place.is_first)  # when all directories have it
    except BaseException:
        if place.is_first:  # what cannot be removed, the next one to be written does
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return whole


class _Stages:
    """Does something on each rank, and tells all ranks who failed."""

    def __init__(self, group: Group, noun: str, name: str, deadline: float):
        self._group = group
        self._noun = noun
        self._name = name
        self._deadline = deadline

    def run(self, stage: str, action: Callable[[], object], does: bool = True) -> None:
        """Runs the action if this rank does it; returns when every rank is done with it."""
        failure: Exception | None = None
        try:
            if does:
                action()
        except Exception as error:  # of any kind: the others wait for a word
            failure = error
        said = None if failure is None else _words(failure)
        everyone = self._group.gather(f"{self._noun} {self._name} {stage}", said, self._deadline)
        failed = {rank: words for rank, words in enumerate(everyone) if words is not None}
        if failed:
            raise CheckpointError(_message(self._noun, self._name, failed)) from failure


class _InOne:
    """How ranks write that share a directory: their indices are files in it."""

    def __init__(self, group: Group, flags: Json, values: Json):
        self._group, self._flags, self._values = group, flags, values
        self.is_first = group.rank == 0
        self._partial = Path()

    def write(self, partial: Path, parts: Sequence[Part]) -> None:
        self._partial = partial
        index = write_shard(partial, self._group.rank, parts)
        _write(_index_file(partial, self._group.rank), manifest.sealed(manifest.dump_index(index)))

    def content(self) -> tuple[Index, Json, Json]:
        return _fold(self._partial, self._group.size), self._flags, self._values


def _index_file(partial: Path, rank: int) -> Path:
    return partial / f"index-{rank:05d}.json"


def _fold(partial: Path, size: int) -> Index:
    """The index of all ranks, whose files are removed."""
    own = [_index_file(partial, rank) for rank in range(size)]
    for rank, file in enumerate(own):
        if not file.exists():
            raise FileNotFoundError(f"what rank {rank} has written is not here: there is no {file}")
    index = entries.merged(json_validation.index(manifest.unsealed(files.read(file))) for file in own)
    for name, size_there in index.shards.items():
        if (partial / name).stat().st_size != size_there:
            raise ValueError(f"{partial / name} does not have {size_there} bytes")
    for file in own:
        file.unlink()
    return index


def _write(path: Path, data: bytes) -> None:
    with files.created(path) as descriptor:
        files.write(descriptor, data, 0)


def _words(error: Exception) -> str:
    text = str(error) if isinstance(error, (OSError, CheckpointError, ValueError)) else repr(error)
    return " ".join(text.split())[:_LONGEST]


def _message(noun: str, name: str, failed: Mapping[int, str]) -> str:
    words = [f"rank {rank}: {said}" for rank, said in list(failed.items())[:_MOST]]
    more = [f"and {len(failed) - _MOST} more ranks"] if len(failed) > _MOST else []
    return (
        f"Every rank must write its part of a {noun}. Received, for {name}: {'; '.join([*words, *more])}. "
        f"Free space, or mend the directory, which all ranks share; the {noun}s before it are as they were."
    )
