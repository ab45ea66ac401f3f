"""Reads a checkpoint; data is only returned after its hash has been verified."""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from tfdist.checkpoint.format import files, manifest, shard
from tfdist.checkpoint.format.entries import PartEntry, TensorEntry
from tfdist.coordination import Json
from tfdist.errors import CheckpointError, CorruptCheckpointError
from tfdist.storage import AnyPath, StoragePath, path_of

_MOST_THREADS = 8
_Ranges = list[tuple[int, int]]


class _Block(NamedTuple):
    """A block to be read into `into`, an array of its shape, or only to be verified if that is None."""

    part: PartEntry
    size: int
    into: np.ndarray | None

    @property
    def file(self) -> str:
        return self.part.file


class LocalFiles(NamedTuple):
    """The files of a checkpoint that one directory has.

    Attributes:
      manifest: SHA-256 of the manifest's bytes, in hexadecimal.
      sizes: size in bytes of all files that belong to it, by name; the manifest is the last.
      intact: names of the existing files that are intact.
    """

    manifest: str
    sizes: dict[str, int]
    intact: list[str]


class Checkpoint:
    """A checkpoint on disk, created by `Checkpoint.open`. It keeps no file open.

    Attributes:
      path: its directory.
      step: number of updates done.
      seed: seed of the run.
      flags: resolved flags of the run by name.
      values: other values of the state that are not tensors.
      tensors: metadata of the tensors, by name.
    """

    def __init__(self, path: StoragePath, content: manifest.Manifest, plans: Mapping[str, shard.ShardPlan]):
        self.path = path
        self.step = content.step
        self.seed = content.seed
        self.flags: Mapping[str, Json] = content.flags
        self.values: Json = content.values
        self.tensors: Mapping[str, TensorEntry] = content.index.tensors
        self._plans = plans
        self._verified: set[tuple[str, str]] = set()  # file and key
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))

    @classmethod
    def open(cls, path: AnyPath) -> "Checkpoint":
        """Reads everything except the tensors' bytes, and checks that the shards have the right sizes and headers.

        Args:
          path: directory of the checkpoint.

        Raises:
          CorruptCheckpointError: it is corrupted.
          InputError: a newer version of the format.
          CheckpointError: the system refuses to read it.
        """
        directory = path_of(path)
        checkpoint = cls._parse(directory, files.read(directory / manifest.NAME))
        for name, plan in checkpoint._plans.items():
            _check_shard(checkpoint.path / name, plan)
        return checkpoint

    @classmethod
    def _parse(cls, directory: StoragePath, data: bytes) -> "Checkpoint":
        """Parses the bytes of a manifest, without reading shards."""
        file = directory / manifest.NAME
        content = manifest.load(file, data)
        plans = shard.plans(content.index)
        for name, size in content.index.shards.items():
            if size != plans[name].size:
                raise CorruptCheckpointError(file, f"{name} cannot have {size} bytes")
        return cls(directory, content, plans)

    @classmethod
    def held(cls, path: AnyPath) -> LocalFiles:
        """Returns which files of a checkpoint are here and intact, reading every byte.

        Args:
          path: directory of the checkpoint, which may have some of its files only.

        Raises:
          CorruptCheckpointError, InputError, CheckpointError: the manifest cannot be read, see `open`.
        """
        directory = path_of(path)
        data = files.read(directory / manifest.NAME)
        checkpoint = cls._parse(directory, data)
        sizes = {name: plan.size for name, plan in checkpoint._plans.items()}
        intact = [name for name in sizes if checkpoint._is_intact(name)]
        own = manifest.NAME
        return LocalFiles(hashlib.sha256(data).hexdigest(), {**sizes, own: len(data)}, [*intact, own])

    def _is_intact(self, name: str) -> bool:
        try:
            _check_shard(self.path / name, self._plans[name])
            self._check([block for block in self._blocks() if block.file == name])
        except CheckpointError:
            return False
        return True

    def read(self, name: str) -> np.ndarray:
        """Returns a complete tensor.

        Raises:
          CorruptCheckpointError: it is corrupted.
          CheckpointError: the system refuses to read it.
        """
        shape = self.tensors[name].shape
        return self.read_block(name, (0,) * len(shape), shape)

    def read_block(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """Returns a block of a tensor; only stored blocks that overlap it are read, completely.

        Args:
          name: name of the tensor.
          offset: start of the block, in elements along each axis.
          shape: shape of the block.

        Raises:
          CorruptCheckpointError: one of the stored blocks is corrupted.
          CheckpointError: the system refuses to read it.
        """
        tensor = self.tensors[name]
        whole = tensor.shape
        fits = (0 <= begin <= begin + size <= end for begin, size, end in zip(offset, shape, whole, strict=False))
        if not len(offset) == len(shape) == len(whole) or not all(fits):
            raise ValueError(f"A block of {name} must be inside it. Received: {shape} at {offset} of {whole}.")
        values = np.empty(tuple(shape), tensor.element)
        blocks: list[_Block] = []
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        for part in tensor.parts:
            overlap = _overlap(part, offset, shape)
            if overlap is None:
                continue
            target = into = values[_slices(overlap, offset)]
            if target.shape != part.shape or not target.flags.c_contiguous:
                into = np.empty(part.shape, tensor.element)
                copies.append((target, into[_slices(overlap, part.offset)]))
            blocks.append(_Block(part, tensor.size_of(part), into))
        self._check(blocks)
        for target, source in copies:
            target[...] = source
        return values

    def verify(self) -> None:
        """Verifies the bytes of all tensors, except those that have already been read, in a constant amount of memory.

        Raises:
          CorruptCheckpointError, CheckpointError: see `read`.
        """
        self._check([block for block in self._blocks() if (block.file, block.part.key) not in self._verified])

    def _blocks(self) -> list[_Block]:
        """Returns all blocks, to be verified only."""
        return [_Block(part, tensor.size_of(part), None) for tensor in self.tensors.values() for part in tensor.parts]

    def _check(self, blocks: Sequence[_Block]) -> None:
        """Reads blocks and verifies their hashes."""
        for file, in_file in itertools.groupby(sorted(blocks, key=attrgetter("file")), attrgetter("file")):
            self._check_in(file, list(in_file))

    def _check_in(self, file: str, blocks: Sequence[_Block]) -> None:
        path, positions = self.path / file, self._plans[file].positions
        with files.opened(path) as opened:
            pieces = [
                piece for block in blocks for piece in files.pieces(positions[block.part.key], block.size, block.into)
            ]
            try:
                hashes = iter(files.read_hashed(opened, pieces, self._threads))
            except EOFError as error:
                raise CorruptCheckpointError(path, "it is too short") from error
        for block in blocks:
            if tuple(itertools.islice(hashes, len(block.part.sha256))) != block.part.sha256:
                raise CorruptCheckpointError(path, f"{block.part.key} is not what was written")
            self._verified.add((file, block.part.key))


def _check_shard(path: StoragePath, plan: shard.ShardPlan) -> None:
    with files.opened(path) as file:
        if file.size != plan.size:
            raise CorruptCheckpointError(path, f"it has {file.size} bytes, not {plan.size}")
        if file.read(len(plan.header)) != plan.header:
            raise CorruptCheckpointError(path, "its header is not what was written")


def _overlap(part: PartEntry, offset: Sequence[int], shape: Sequence[int]) -> _Ranges | None:
    """Returns the overlap of a stored block with a block, as ranges along each axis; None if there is none."""
    axes = zip(part.offset, part.shape, offset, shape, strict=True)
    ranges = [(max(p, b), min(p + p_size, b + b_size)) for p, p_size, b, b_size in axes]
    return None if any(end <= begin for begin, end in ranges) else ranges


def _slices(ranges: _Ranges, offset: Sequence[int]) -> tuple[Any, ...]:
    """Returns the index of ranges in an array that begins at the offset; selects a view even without axes."""
    return (..., *(slice(begin - at, end - at) for (begin, end), at in zip(ranges, offset, strict=True)))


def first_readable(paths: Sequence[StoragePath]) -> Checkpoint:
    """Returns the first checkpoint whose manifest can be read; `paths` must not be empty.

    Raises:
      CorruptCheckpointError: none can be read; the error is that of the last one.
    """
    for path in paths[:-1]:
        with contextlib.suppress(CorruptCheckpointError):
            return Checkpoint.open(path)
    return Checkpoint.open(paths[-1])
