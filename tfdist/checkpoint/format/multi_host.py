"""Writes a checkpoint to several hosts without a shared directory.

Each host has the manifest, the files of its own ranks, and copies of files of others. Replicated data is in one file
that each host writes for itself, so that it is not sent. The parts of a single rank are in a file on its host, and on
the next host, to which the bytes are sent. So if one host is lost, the others have everything.
"""

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from tfdist.checkpoint.format import files, json_validation, manifest
from tfdist.checkpoint.format.entries import Index, merged
from tfdist.checkpoint.format.part import Part
from tfdist.checkpoint.format.shard import shard_name, write_shard
from tfdist.coordination import Group, Json
from tfdist.storage import StoragePath

_MESSAGE = 1 << 19  # characters per message of a group, without its framing


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
        """Initializes the write.

        Args:
          group: group of all ranks.
          over: their hosts.
          flags: flags in the manifest; rank 0's are used.
          values: values in the manifest; rank 0's are used.
        """
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
        own, replicated = (manifest.dump_index(write_shard(partial, number, those)) for number, those in numbered)
        # Encoded here, because a rank that failed in `exchange` would leave the others waiting.
        self._text = _packed(self._words | {"own": own, "replicated": replicated})

    def exchange(self, name: str, deadline: float) -> None:
        """Exchanges the indices of all ranks, and rank 0's flags and values; every rank must call it.

        It fails on all ranks or on none, so it must not be a stage, where a failed rank would report by another gather.
        """
        self._texts = _gathered(self._group, name, self._text, deadline)

    def understand(self) -> None:
        """Decodes the exchanged indices.

        Raises:
          ValueError: on rank 0, if parts that should be replicated differ between hosts.
        """
        self._said = list(map(_unpacked, self._texts))
        if self._group.rank == 0:
            for rank in self._firsts[1:]:
                self._check(rank)

    def _check(self, rank: int) -> None:
        here, there = (self._said[one]["replicated"]["tensors"] for one in (0, rank))
        differs = [name for name in {**here, **there} if here.get(name) != there.get(name)]
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
    mine = [text[at : at + _MESSAGE] for at in range(0, len(text), _MESSAGE)]
    texts = [""] * group.size
    for number in range(max(group.gather(f"{name} messages", len(mine), deadline))):
        piece = mine[number] if number < len(mine) else ""
        for rank, more in enumerate(group.gather(f"{name} {number}", piece, deadline)):
            texts[rank] += more
    return texts
