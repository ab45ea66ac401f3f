"""Metadata of a checkpoint's tensors, and its validation, because it may be parsed from untrusted JSON."""

import dataclasses
import math
import re
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tfdist.checkpoint.format import files

_SHARD = re.compile(r"shard-[0-9]{5,9}\.safetensors")  # a name in the checkpoint's directory, without a path
_MAX_BYTES = 2**63 - 1  # maximum size of an array
_MAX_AXES = 32  # maximum number of axes that every version of NumPy supports


@dataclasses.dataclass(frozen=True)
class BlockEntry:
    """A block of a tensor and its location."""

    file: str  # name of the shard in the checkpoint's directory
    key: str  # name of the block in the shard
    offset: tuple[int, ...]  # start of the block in the tensor, in elements along each axis
    shape: tuple[int, ...]  # shape of the block
    sha256: tuple[str, ...]  # hash of each piece of `files.PIECE_BYTES` bytes of the block, in hexadecimal


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Metadata of a tensor."""

    dtype: str  # a key of `files.DTYPES`
    shape: tuple[int, ...]  # shape of the complete tensor
    parts: tuple[BlockEntry, ...]  # blocks that tile the tensor, ordered by offset

    @property
    def numpy_dtype(self) -> np.dtype:
        """NumPy dtype of the tensor."""
        return files.DTYPES[self.dtype]

    def size_of(self, part: BlockEntry) -> int:
        """Returns the size of a block in bytes."""
        return math.prod(part.shape) * self.numpy_dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Index:
    """The shards of one or all processes, and the tensors whose blocks the shards contain."""

    shards: Mapping[str, int]  # size of each shard in bytes, by file name
    tensors: Mapping[str, TensorEntry]  # tensors by name

    def blocks(self) -> Iterator[tuple[TensorEntry, BlockEntry]]:
        """Yields every block with its tensor."""
        return ((tensor, part) for tensor in self.tensors.values() for part in tensor.parts)


def merge_indices(indices: Iterable[Index]) -> Index:
    """Merges the indices of several processes' shards.

    Raises:
      ValueError: two indices have a shard with the same name, or a tensor with different dtypes or shapes.
    """
    shards: dict[str, int] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    parts: dict[str, list[BlockEntry]] = defaultdict(list)
    for index in indices:
        if duplicates := shards.keys() & index.shards.keys():
            raise ValueError(f"two processes have written the shard {min(duplicates)}")
        shards |= index.shards
        for name, tensor in index.tensors.items():
            kind = (tensor.dtype, tensor.shape)
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"blocks of {name} have different tensor specs, {kinds[name]} and {kind}")
            parts[name] += tensor.parts
    for tensor_parts in parts.values():
        tensor_parts.sort(key=lambda part: (part.offset, part.shape))
    return Index(shards, {name: TensorEntry(*kinds[name], tuple(parts[name])) for name in kinds})


def parse(kind: Any, value: Any, label: str) -> Any:
    """Converts JSON to a value of a type: a dataclass, `Mapping[str, T]`, `tuple[T, ...]`, int, str or Any.

    Raises:
      ValueError: the JSON does not match the type; the message begins with `label`.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        kinds = {field.name: field.type for field in dataclasses.fields(kind)}
        if value.keys() == kinds.keys():
            return kind(**{name: parse(kinds[name], value[name], f"{name} of {label}") for name in kinds})
    elif origin is Mapping and isinstance(value, dict):
        return {name: parse(arguments[1], item, f"{name!r:.80} in {label}") for name, item in value.items()}
    elif origin is tuple and isinstance(value, list):
        return tuple(parse(arguments[0], item, label) for item in value)
    elif kind is Any or type(value) is kind:
        return value
    raise ValueError(f"{label} is {value!r:.80}")


def check(index: Index) -> None:
    """Raises `ValueError` if an index is inconsistent; does not check the sizes of the files."""
    for file in index.shards:
        if not _SHARD.fullmatch(file):
            raise ValueError(f"a shard has the invalid name {file!r:.80}")
    used_keys = set()
    for name, tensor in index.tensors.items():
        _check_size(name, tensor)
        _check_tiling(name, tensor)
        for part in tensor.parts:
            if part.file not in index.shards:
                raise ValueError(f"a block of {name} is in {part.file}, which is not listed as a shard")
            if (part.file, part.key) in used_keys or part.key == "__metadata__":
                raise ValueError(f"{part.key} in {part.file} is not the key of exactly one block")
            used_keys.add((part.file, part.key))
            if len(part.sha256) != (expected := files.piece_count(tensor.size_of(part))):
                raise ValueError(f"{part.key} in {part.file} has {len(part.sha256)} hashes instead of {expected}")
    if unused_shards := index.shards.keys() - {file for file, _ in used_keys}:
        raise ValueError(f"the shard {min(unused_shards)} contains no tensor")


def _check_size(name: str, tensor: TensorEntry) -> None:
    shape = tensor.shape
    if tensor.dtype not in files.DTYPES:
        raise ValueError(f"{name} has the unsupported dtype {tensor.dtype!r:.40}")
    if len(shape) > _MAX_AXES or min(shape, default=0) < 0:
        raise ValueError(f"{name} cannot have the shape {shape}")
    if math.prod(max(1, n) for n in shape) * tensor.numpy_dtype.itemsize > _MAX_BYTES:
        raise ValueError(f"{name} cannot have the shape {shape}")


def _check_tiling(name: str, tensor: TensorEntry) -> None:
    axes = len(tensor.shape)
    for part in tensor.parts:
        if not len(part.offset) == len(part.shape) == axes or any(
            not 0 <= begin <= begin + size <= length
            for begin, size, length in zip(part.offset, part.shape, tensor.shape, strict=True)
        ):
            raise ValueError(f"a block of {name} has shape {part.shape} at {part.offset}, outside of {tensor.shape}")
    if sum(math.prod(part.shape) for part in tensor.parts) != math.prod(tensor.shape):
        raise ValueError(f"the blocks of {name} do not have its number of elements, {math.prod(tensor.shape)}")
    blocks = sorted((part.offset, part.shape) for part in tensor.parts if math.prod(part.shape))
    begins = np.array([offset for offset, _ in blocks], np.int64).reshape(len(blocks), axes)
    ends = begins + np.array([shape for _, shape in blocks], np.int64).reshape(len(blocks), axes)
    for i in range(len(blocks) - 1):
        is_disjoint = (begins[i + 1 :] >= ends[i]) | (ends[i + 1 :] <= begins[i])
        if not is_disjoint.any(axis=1).all():
            raise ValueError(f"two blocks of {name} overlap at {blocks[i][0]}")
