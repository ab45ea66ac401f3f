"""Reads checkpoints; data is returned only after its hash has been verified."""

import contextlib
import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdist.checkpoint.format import files, manifest, shard
from tfdist.checkpoint.format.entries import BlockEntry, TensorEntry
from tfdist.coordination import Json
from tfdist.errors import CheckpointError, CorruptCheckpointError
from tfdist.storage import AnyPath, StoragePath, path_of

_MAX_THREADS = 8


class _BlockRead(NamedTuple):
    """A stored block to read into `destination`, an array of its shape, or only to verify if `destination` is None."""

    part: BlockEntry
    size: int
    destination: np.ndarray | None


class LocalFiles(NamedTuple):
    """The files of a checkpoint in one directory."""

    manifest_hash: str  # SHA-256 of the manifest's bytes, in hexadecimal
    sizes: dict[str, int]  # size in bytes of each file of the checkpoint, by name; the manifest is the last entry
    intact_names: list[str]  # names of the files that exist and are intact


class Checkpoint:
    """A checkpoint on disk, which keeps no file open; create one with `Checkpoint.open`.

    Attributes:
      path: directory of the checkpoint.
      step: number of completed updates.
      seed: seed of the run.
      flags: resolved flags of the run by name.
      values: state other than tensors.
      tensors: metadata of the tensors, by name.
    """

    def __init__(self, path: StoragePath, content: manifest.Manifest, plans: Mapping[str, shard.ShardPlan]):
        self.path = path
        self.step = content.step
        self.seed = content.seed
        self.flags: Mapping[str, Json] = content.flags
        self.values: Json = content.values
        self.tensors: Mapping[str, TensorEntry] = content.tensors
        self._plans = plans
        self._verified_blocks: set[tuple[str, str]] = set()  # file and key of each verified block
        self._threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))

    @classmethod
    def open(cls, path: AnyPath) -> "Checkpoint":
        """Reads the manifest, and checks the sizes and headers of the shards.

        Raises:
          CorruptCheckpointError: the checkpoint is corrupted.
          InputError: its format is newer than this version of tfdist.
          CheckpointError: the checkpoint cannot be read.
        """
        directory = path_of(path)
        checkpoint = cls._parse(directory, files.read(directory / manifest.FILE_NAME))
        for name, plan in checkpoint._plans.items():
            _check_shard(checkpoint.path / name, plan)
        return checkpoint

    @classmethod
    def _parse(cls, directory: StoragePath, data: bytes) -> "Checkpoint":
        file = directory / manifest.FILE_NAME
        content = manifest.load(file, data)
        plans = shard.plans(content)
        for name, size in content.shards.items():
            if size != plans[name].size:
                raise CorruptCheckpointError(file, f"{name} has {size} bytes instead of {plans[name].size}")
        return cls(directory, content, plans)

    @classmethod
    def local_files(cls, path: AnyPath) -> LocalFiles:
        """Returns the files in a checkpoint's directory, which may be incomplete, after verifying every byte.

        Raises:
          CorruptCheckpointError, InputError, CheckpointError: the manifest cannot be read; see `open`.
        """
        directory = path_of(path)
        data = files.read(directory / manifest.FILE_NAME)
        checkpoint = cls._parse(directory, data)
        sizes = {name: plan.size for name, plan in checkpoint._plans.items()}
        intact = [name for name in sizes if checkpoint._is_intact(name)]
        digest = hashlib.sha256(data).hexdigest()
        return LocalFiles(digest, {**sizes, manifest.FILE_NAME: len(data)}, [*intact, manifest.FILE_NAME])

    def _is_intact(self, name: str) -> bool:
        try:
            _check_shard(self.path / name, self._plans[name])
            self._read_blocks([block for block in self._blocks() if block.part.file == name])
        except CheckpointError:
            return False
        return True

    def read(self, name: str) -> np.ndarray:
        """Returns a complete tensor.

        Raises:
          CorruptCheckpointError: the tensor is corrupted.
          CheckpointError: the tensor cannot be read.
        """
        shape = self.tensors[name].shape
        return self.read_block(name, (0,) * len(shape), shape)

    def read_block(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """Returns a block of a tensor; `offset` is in elements along each axis. Reads all stored blocks that overlap it.

        Raises:
          CorruptCheckpointError: a stored block is corrupted.
          CheckpointError: a stored block cannot be read.
        """
        tensor = self.tensors[name]
        tensor_shape = tensor.shape
        fits = (0 <= begin <= begin + n <= end for begin, n, end in zip(offset, shape, tensor_shape, strict=False))
        if not len(offset) == len(shape) == len(tensor_shape) or not all(fits):
            raise ValueError(
                f"A block of {name} must be inside the tensor. Received: {shape} at {offset} of {tensor_shape}."
            )
        values = np.empty(tuple(shape), tensor.numpy_dtype)
        blocks: list[_BlockRead] = []
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        for part in tensor.parts:
            axes = zip(part.offset, part.shape, offset, shape, strict=True)  # of the stored and of the requested block
            overlap = [(max(p, b), min(p + p_size, b + b_size)) for p, p_size, b, b_size in axes]
            if any(end <= begin for begin, end in overlap):
                continue
            target = destination = values[_slices(overlap, offset)]
            if target.shape != part.shape or not target.flags.c_contiguous:
                destination = np.empty(part.shape, tensor.numpy_dtype)
                copies.append((target, destination[_slices(overlap, part.offset)]))
            blocks.append(_BlockRead(part, tensor.size_of(part), destination))
        self._read_blocks(blocks)
        for target, source in copies:
            target[...] = source
        return values

    def verify(self) -> None:
        """Verifies the bytes of all blocks that have not been read, in constant memory; see `read` for errors."""
        verified = self._verified_blocks
        self._read_blocks([block for block in self._blocks() if (block.part.file, block.part.key) not in verified])

    def _blocks(self) -> list[_BlockRead]:
        return [
            _BlockRead(part, tensor.size_of(part), None) for tensor in self.tensors.values() for part in tensor.parts
        ]

    def _read_blocks(self, blocks: Sequence[_BlockRead]) -> None:
        blocks_by_file: dict[str, list[_BlockRead]] = defaultdict(list)
        for block in blocks:
            blocks_by_file[block.part.file].append(block)
        for file in sorted(blocks_by_file):
            self._read_blocks_of_file(file, blocks_by_file[file])

    def _read_blocks_of_file(self, file: str, blocks: Sequence[_BlockRead]) -> None:
        path, positions = self.path / file, self._plans[file].positions
        with files.open_file(path) as stored_file:
            pieces = [x for b in blocks for x in files.pieces(positions[b.part.key], b.size, b.destination)]
            try:
                hashes = iter(files.read_hashed(stored_file, pieces, self._threads))
            except EOFError as error:
                raise CorruptCheckpointError(path, "it is too short") from error
        for block in blocks:
            if tuple(itertools.islice(hashes, len(block.part.sha256))) != block.part.sha256:
                raise CorruptCheckpointError(path, f"the hash of {block.part.key} does not match")
            self._verified_blocks.add((file, block.part.key))


def _check_shard(path: StoragePath, plan: shard.ShardPlan) -> None:
    with files.open_file(path) as file:
        if file.size != plan.size:
            raise CorruptCheckpointError(path, f"it has {file.size} bytes instead of {plan.size}")
        if file.read(len(plan.header)) != plan.header:
            raise CorruptCheckpointError(path, "its header does not match the manifest")


def _slices(ranges: Sequence[tuple[int, int]], offset: Sequence[int]) -> tuple[Any, ...]:
    """Returns the index that selects ranges of an array that begins at `offset`, as a view even for a scalar."""
    return (..., *(slice(begin - origin, end - origin) for (begin, end), origin in zip(ranges, offset, strict=True)))


def first_readable_checkpoint(paths: Sequence[StoragePath]) -> Checkpoint:
    """Returns the first checkpoint whose manifest can be read; `paths` must not be empty.

    Raises:
      CorruptCheckpointError: no manifest can be read; the error is that of the last checkpoint.
    """
    for path in paths[:-1]:
        with contextlib.suppress(CorruptCheckpointError):
            return Checkpoint.open(path)
    return Checkpoint.open(paths[-1])
