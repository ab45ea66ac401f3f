"""How fast a checkpoint is written and read, compared with `dd` of the same bytes on the same disk.

    python benchmarks/checkpoint_io.py --directory=/where/checkpoints/go

One process with tensors [1024, 2048] of float32. `write` and `dd conv=fsync` end when the bytes are on the disk; `read` and
`verify` are those of `dd` to nowhere, with the file in the system's cache and, `from the disk`, without. Every byte is hashed
with SHA-256 on the way: `hash` does that alone, with the bytes in memory and as many threads, and is what the others cannot
be faster than. The sides take turns, every other round backwards.
"""

import argparse
import hashlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import machine
import numpy as np
import starting
from paired import ratio_of_medians

from tfdist.checkpoint.format import Checkpoint, TensorBlock, files, write_checkpoint, write_shard
from tfdist.coordination import LocalGroup

TENSOR = (1024, 2048)
AGAINST = {
    "write": "dd write",
    "read": "dd read",
    "verify": "dd read",
    "hash": "dd read",
    "read, from the disk": "dd read, from the disk",
}


class Sides:
    """What is timed, in a directory of its own."""

    def __init__(self, directory: pathlib.Path, megabytes: int):
        random = np.random.default_rng(0)
        count = max(1, megabytes * 10**6 // (4 * TENSOR[0] * TENSOR[1]))
        self.parts = [
            TensorBlock.full(f"layer_{number}/kernel", random.standard_normal(TENSOR, np.float32))
            for number in range(count)
        ]
        self.bytes = sum(part.values.nbytes for part in self.parts)
        self._directory = directory
        self._path = write_checkpoint(LocalGroup(), directory, self.parts, step=1, seed=1, flags={}, values={}, keep=1)
        [self._shard] = self._path.glob("shard-*")
        self._copy = directory / "copy"
        self._written = directory / "shard-00000.safetensors"

    def works(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """By name of a side: what is not timed before it, and what is timed."""
        return {
            "write": (self._clean, lambda: write_shard(self._directory, 0, self.parts)),
            "dd write": (self._clean, lambda: self._dd(self._copy, "conv=fsync")),
            "read": (self._warm, self._read),
            "verify": (self._warm, lambda: Checkpoint.open(self._path).verify()),
            "hash": (self._warm, self._hash),
            "dd read": (self._warm, lambda: self._dd("/dev/null")),
            "read, from the disk": (self._cold, self._read),
            "dd read, from the disk": (self._cold, lambda: self._dd("/dev/null")),
        }

    def _dd(self, to: str | os.PathLike[str], *options: str) -> None:
        command = ["dd", f"if={self._shard}", f"of={to}", "bs=1M", *options]
        subprocess.run(command, check=True, capture_output=True)

    def _read(self) -> None:
        checkpoint = Checkpoint.open(self._path)
        for name in checkpoint.tensors:
            checkpoint.read(name)

    def _hash(self) -> None:
        each = [piece.memory for part in self.parts for piece in files.pieces(0, part.values.nbytes, part.values)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(hashlib.sha256, each))

    def _clean(self) -> None:
        for path in (self._copy, self._written):
            path.unlink(missing_ok=True)
        self._warm()

    def _warm(self) -> None:
        self._dd("/dev/null")

    def _cold(self) -> None:
        with open(self._shard, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(sides: Sides, pairs: int) -> dict[str, list[float]]:
    """Each side's times, one a round; a round before them does not count."""
    times: dict[str, list[float]] = defaultdict(list)
    works = list(sides.works().items())
    for turn in range(pairs + 1):
        for name, (before, work) in works if turn % 2 else works[::-1]:
            before()
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    return {name: own[1:] for name, own in times.items()}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".", help="on the disk to measure")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=9)
    given = parser.parse_args()
    print(machine.description(starting.PEERS))
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        sides = Sides(pathlib.Path(directory), given.megabytes)
        found = seconds(sides, given.pairs)
    print("\n| side | MB/s | MB/s of dd | times as fast as dd (95%) |\n| --- | --- | --- | --- |")
    for name, against in AGAINST.items():
        ours, theirs = (sides.bytes / 1e6 / statistics.median(found[side]) for side in (name, against))
        print(f"| {name} | {ours:.0f} | {theirs:.0f} | {ratio_of_medians(found[against], found[name])} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
