"""Writes the tensors of a checkpoint in the safetensors format: 8 bytes of length, a JSON header, the data.

Blocks are sorted by decreasing element size, for alignment, and by name, so the header is a function of the index. The
safetensors package is not used because it writes in one thread, without hashing.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from tfdist.checkpoint.format import files
from tfdist.checkpoint.format.entries import BlockEntry, Index, TensorEntry, merge_indices
from tfdist.storage import StoragePath, storage_of

THREADS = 2  # number of threads that hash and write, while training uses the other cores


@dataclasses.dataclass(frozen=True)
class TensorBlock:
    """A block of one tensor in one process. The blocks of all processes tile the tensor."""

    name: str  # name of the tensor, unique in the checkpoint
    shape: tuple[int, ...]  # shape of the complete tensor
    offset: tuple[int, ...]  # start of the block, in elements along each axis
    values: np.ndarray  # elements of the block, C-contiguous, with a dtype of `files.DTYPES`; must not be modified

    @classmethod
    def full(cls, name: str, values: np.ndarray) -> "TensorBlock":
        """Returns a complete tensor as a single block."""
        return cls(name, values.shape, (0,) * values.ndim, values)

    def __post_init__(self) -> None:
        if not files.is_supported_dtype(self.values.dtype):
            dtype_names = ", ".join(files.DTYPES)
            raise ValueError(f"{self.name} must have one of the dtypes {dtype_names}. Received: {self.values.dtype!r}.")

    @property
    def key(self) -> str:
        """Name of the block in its shard: the tensor's name, followed by the slices if the block is not the complete tensor."""
        if self.values.shape == self.shape:
            return self.name
        ends = zip(self.offset, self.values.shape, strict=True)
        return f"{self.name}[{','.join(f'{begin}:{begin + size}' for begin, size in ends)}]"


class ShardPlan(NamedTuple):
    """The layout of one shard."""

    header: bytes  # length and JSON header, the first bytes of the file
    positions: Mapping[str, int]  # position of each block in the file in bytes, by key
    size: int  # size of the file in bytes


class _BlockSpec(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    size: int


def shard_name(rank: int) -> str:
    """Returns the file name of a rank's shard."""
    return f"shard-{rank:05d}.safetensors"


def plans(index: Index) -> dict[str, ShardPlan]:
    """Returns the layout of each shard of an index that `entries.check` accepts."""
    blocks: dict[str, dict[str, _BlockSpec]] = defaultdict(dict)
    for tensor, part in index.blocks():
        blocks[part.file][part.key] = _BlockSpec(tensor.dtype, part.shape, tensor.size_of(part))
    return {file: _plan(file_blocks) for file, file_blocks in blocks.items()}


def _plan(blocks: Mapping[str, _BlockSpec]) -> ShardPlan:
    header, starts, end = {}, {}, 0
    for key in sorted(blocks, key=lambda key: (-files.DTYPES[blocks[key].dtype].itemsize, key)):
        dtype, shape, size = blocks[key]
        starts[key], end = end, end + size
        header[key] = {"dtype": files.SAFETENSORS_DTYPES[dtype], "shape": shape, "data_offsets": (starts[key], end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data_start = 8 + len(text)
    positions = {key: data_start + start for key, start in starts.items()}
    return ShardPlan(len(text).to_bytes(8, "little") + text, positions, data_start + end)


def write_shard(directory: StoragePath, rank: int, parts: Sequence[TensorBlock]) -> Index:
    """Writes a shard with the blocks of one process, if it has any; returns its index. The blocks' keys must be unique."""
    if not parts:
        return Index({}, {})
    keys = [part.key for part in parts]
    if len(set(keys)) < len(keys):
        raise ValueError(f"Blocks must have unique keys. Received twice: {max(keys, key=keys.count)}.")
    file, plan = shard_name(rank), _plan(_blocks(parts))
    sorted_parts = sorted(parts, key=lambda part: plan.positions[part.key])  # writing in file order is faster
    with storage_of(directory).create(directory / file) as new_file:
        new_file.write(plan.header, 0)
        pieces = [x for p in sorted_parts for x in files.pieces(plan.positions[p.key], p.values.nbytes, p.values)]
        hashes = iter(files.write_hashed(new_file, pieces, THREADS))
    indices = []
    for part in sorted_parts:
        part_hashes = tuple(islice(hashes, files.piece_count(part.values.nbytes)))
        entry = BlockEntry(file, part.key, part.offset, part.values.shape, part_hashes)
        indices.append(Index({}, {part.name: TensorEntry(part.values.dtype.name, part.shape, (entry,))}))
    return Index({file: plan.size}, merge_indices(indices).tensors)


def shard_bytes(parts: Sequence[TensorBlock]) -> np.ndarray:
    """Returns the contents of the file that `write_shard` writes, uint8; empty if there are no blocks."""
    if not parts:
        return np.zeros(0, np.uint8)
    plan = _plan(_blocks(parts))
    data = np.empty(plan.size, np.uint8)
    data[: len(plan.header)] = np.frombuffer(plan.header, np.uint8)
    for part in parts:
        position = plan.positions[part.key]
        data[position : position + part.values.nbytes] = part.values.reshape(-1).view(np.uint8)
    return data


def _blocks(parts: Sequence[TensorBlock]) -> dict[str, _BlockSpec]:
    return {part.key: _BlockSpec(part.values.dtype.name, part.values.shape, part.values.nbytes) for part in parts}
