"""Writes a checkpoint from all processes, atomically.

Rank 0 creates a partial directory, every rank writes its shard there and sends its index to the other ranks, and rank 0 writes
the manifest and renames the directory. If the ranks do not share a directory, the first rank of each host does the work of
rank 0 in that host's directory.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.checkpoint.format import directory as checkpoint_directory
from tfdist.checkpoint.format import files, manifest
from tfdist.checkpoint.format.entries import Index, merge_indices, parse
from tfdist.checkpoint.format.shard import TensorBlock, shard_name, write_shard
from tfdist.coordination import Group, Json
from tfdist.errors import CheckpointError
from tfdist.storage import AnyPath, StoragePath, path_of, storage_of

# Without a shared directory, each host has the manifest, the files of its ranks, and copies of files of the previous host.
# Replicated data is in one file, which each host writes without communication. If one host is lost, no data is lost.

# Maximum number of characters in a message of a group; JSON may escape each of them.
_MAX_MESSAGE_LENGTH = 1 << 18
_MAX_ERROR_LENGTH = 500  # maximum number of characters of a rank's error message
_MAX_ERRORS = 3  # maximum number of ranks whose errors are reported


@dataclasses.dataclass(frozen=True)
class HostPlacement:
    """The placement of a checkpoint's files on hosts without a shared directory."""

    # For each directory, the ranks that share it, in order; the directory of rank 0 is first.
    hosts: Sequence[Sequence[int]]
    # Replicated blocks, on the first rank of each host; empty on other ranks.
    replicated_parts: Sequence[TensorBlock] = ()
    # Contents of the files of ranks on other hosts that this rank writes, by rank; see `shard_bytes`.
    copies: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)


def copy_holder(rank: int, hosts: Sequence[Sequence[int]]) -> int:
    """Returns the rank on the next host that stores a copy of a rank's file."""
    host_index = next(index for index, host in enumerate(hosts) if rank in host)
    next_host = hosts[(host_index + 1) % len(hosts)]
    return next_host[hosts[host_index].index(rank) % len(next_host)]


class _Writer:
    """Writes this rank's files; the ranks exchange the indices of their files through the group."""

    def __init__(self, group: Group, partial: StoragePath, placement: HostPlacement, flags: Json, values: Json):
        self._group, self._partial, self._placement = group, partial, placement
        self._metadata = {"flags": flags, "values": values} if group.rank == 0 else {}
        self._host = next(host for host in placement.hosts if group.rank in host)
        self.is_first = self._host[0] == group.rank  # does the work that is done once per directory
        self._text = ""  # JSON of the indices of this rank's files and, on rank 0, flags and values
        self._messages: dict[int, Any] = {}  # parsed `_text` of all ranks that have not departed, by rank

    def write(self, parts: Sequence[TensorBlock]) -> None:
        """Writes this rank's files; the file of replicated blocks is named like that of a rank `group.size`.

        Raises:
          ValueError, TypeError: on rank 0, if flags or values are not JSON.
        """
        for rank, data in self._placement.copies.items():
            files.write(self._partial / shard_name(rank), data.data)
        numbered_parts = ((self._group.rank, parts), (self._group.size, self._placement.replicated_parts))
        index, replicated_index = (
            dataclasses.asdict(write_shard(self._partial, *numbered)) for numbered in numbered_parts
        )
        # Encoded here, because a failure in `exchange` would leave the other ranks waiting.
        self._text = json.dumps(self._metadata | {"own": index, "replicated": replicated_index})

    def exchange(self, name: str, deadline: float) -> None:
        """Exchanges the indices of all ranks, and rank 0's flags and values; every process must call this.

        Not a stage, because it fails on all ranks or on none, while a failure in a stage is reported with another gather.
        """
        texts = _gather_text(self._group, name, self._text, deadline)
        if self.is_first:
            self._messages = {rank: json.loads(text) for rank, text in enumerate(texts) if text}

    def check(self) -> None:
        """Checks the files of the ranks that share this directory and, on rank 0, that replicated blocks are equal.

        Raises:
          ValueError: a file is missing or incomplete, or blocks that should be replicated differ between hosts.
        """
        for rank in filter(self._messages.__contains__, self._host):
            for name, size in self._messages[rank]["own"]["shards"].items():
                info = storage_of(self._partial).info(self._partial / name)
                if info is None or info.size != size:
                    raise ValueError(
                        f"the shard of rank {rank} is missing or incomplete: {self._partial / name} must have {size} bytes"
                    )
        expected = self._messages[0]["replicated"]["tensors"]
        for rank in [host[0] for host in self._placement.hosts] if self._group.rank == 0 else []:
            received = self._messages[rank]["replicated"]["tensors"]
            mismatches = [name for name in {**expected, **received} if expected.get(name) != received.get(name)]
            if mismatches:
                raise ValueError(f"{mismatches[0]} differs between rank {rank} and rank 0; see --check_sync_every")

    def content(self, step: int, seed: int) -> manifest.Manifest:
        indices = [self._messages[0]["replicated"], *(message["own"] for message in self._messages.values())]
        index = merge_indices(parse(Index, index, "an index") for index in indices)
        flags, values = self._messages[0]["flags"], self._messages[0]["values"]
        return manifest.Manifest(index.shards, index.tensors, step, seed, flags, values)


def _gather_text(group: Group, name: str, text: str, deadline: float) -> list[str]:
    """Same as `group.gather`, in several messages because texts may be long: an index has a hash for every 4 MiB."""
    pieces = [text[start : start + _MAX_MESSAGE_LENGTH] for start in range(0, len(text), _MAX_MESSAGE_LENGTH)]
    texts = [""] * group.size
    for index in range(max(count or 0 for count in group.gather(f"{name} messages", len(pieces), deadline))):
        piece = pieces[index] if index < len(pieces) else ""
        for rank, rank_piece in enumerate(group.gather(f"{name} {index}", piece, deadline)):
            texts[rank] += rank_piece or ""
    return texts


def write_checkpoint(
    group: Group,
    directory: AnyPath,
    parts: Sequence[TensorBlock],
    *,
    step: int,
    seed: int,
    flags: Mapping[str, Json],
    values: Json,
    keep: int,
    keep_steps: Collection[int] = (),
    noun: str = "checkpoint",
    deadline: float = 3600.0,
    placement: HostPlacement | None = None,
) -> StoragePath:
    """Writes a checkpoint and returns when it is durable; every rank must call it, from any thread.

    Args:
      group: the processes that write together.
      directory: directory of the run's checkpoints, shared by all ranks unless `placement` is specified; created if
        necessary. Only one job may write there (see `lock`), and only one checkpoint at a time, because other partial
        checkpoints are removed.
      parts: this rank's blocks. The blocks of all ranks must tile each tensor.
      step: number of completed updates; a checkpoint of the same step is replaced.
      seed: seed of the run.
      flags: resolved flags of the run by name, as JSON; rank 0's are used.
      values: other values of the state, as JSON without nan and inf; rank 0's are used.
      keep: number of newest checkpoints to keep, at least 1; the one just written is always kept.
      keep_steps: steps of further checkpoints to keep.
      noun: name of a checkpoint in messages; checkpoints with different nouns may be written concurrently to different
        directories.
      deadline: maximum time in seconds by which the slowest rank may lag behind the fastest rank in each stage.
      placement: placement of the files if the ranks do not share a directory; `parts` are then the blocks that only this
        rank has.

    Returns:
      Path of the checkpoint.

    Raises:
      CheckpointError: a rank failed; raised on every rank. Existing checkpoints are unchanged.
      PeerLostError: a rank is lost or did not call in time.
    """
    home = path_of(directory)
    partial_path = checkpoint_directory.partial_path(home, step)
    final_path = home / checkpoint_directory.checkpoint_name(step)
    writer = _Writer(group, partial_path, placement or HostPlacement([range(group.size)]), dict(flags), values)

    def run(stage: str, action: Callable[[], object], takes_part: bool = True) -> None:
        """Runs a stage on the ranks that take part; returns when all ranks have completed it, or raises their errors."""
        failure: Exception | None = None
        try:
            if takes_part:
                action()
        except Exception as error:  # any error, because the other ranks are waiting for a message
            failure = error
        message = None if failure is None else _error_text(failure)
        answers = group.gather(f"{noun} {final_path.name} {stage}", message, deadline)
        failures = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
        if failures:
            raise CheckpointError(_message(noun, final_path.name, failures)) from failure

    def publish() -> None:
        files.write(partial_path / manifest.FILE_NAME, manifest.dump(writer.content(step, seed)))
        checkpoint_directory.publish(partial_path, final_path)

    try:
        run("begin", lambda: checkpoint_directory.make_partial(home, step), writer.is_first)
        run("shards", lambda: writer.write(parts))
        writer.exchange(f"{noun} {final_path.name} index", deadline)
        run("indices", writer.check, writer.is_first)
        run("manifest", publish, writer.is_first)
        # Only after publication in all directories, because this removes older checkpoints.
        run("prune", lambda: checkpoint_directory.prune(home, keep, final_path, keep_steps), writer.is_first)
    except BaseException:
        if writer.is_first:  # files that cannot be removed now are removed by the next write
            with contextlib.suppress(OSError):
                storage_of(partial_path).remove_directory(partial_path)
        raise
    return final_path


def _error_text(error: Exception) -> str:
    text = str(error) if isinstance(error, (OSError, CheckpointError, ValueError)) else repr(error)
    return " ".join(text.split())[:_MAX_ERROR_LENGTH]


def _message(noun: str, name: str, failures: Mapping[int, str]) -> str:
    errors = [f"rank {rank}: {error}" for rank, error in list(failures.items())[:_MAX_ERRORS]]
    suffix = [f"and {len(failures) - _MAX_ERRORS} more ranks"] if len(failures) > _MAX_ERRORS else []
    return (
        f"Every rank must write its part of the {noun}. Received, for {name}: {'; '.join([*errors, *suffix])}. "
        f"Free up disk space, or repair the directory, which all ranks share; earlier {noun}s are unchanged."
    )
