"""Several ranks, each with its own directory, transfer bytes and share commits."""

import pathlib

import numpy as np

import tfdist
from tfdist.checkpoint import replication
from tfdist.coordination import Group

PIECE = 1000


def bytes_of(rank: int) -> np.ndarray:
    """Returns several pieces of bytes, whose length is not a multiple of a dtype's size; nothing for rank 1."""
    return np.random.default_rng(rank).integers(0, 256, (2501 + rank) * (rank != 1), np.uint8)


def work(strategy: tfdist.Strategy, directory: pathlib.Path, *folders: str) -> None:
    replication._MAX_BYTES_AT_ONCE = 3 * PIECE
    carry(replication.ByteTransfer(strategy), strategy.group)
    for folder in folders:
        found = replication.replicate_newest_checkpoint(strategy, directory / f"host{strategy.cluster.rank}" / folder)
        print(f"{folder}: {found}", flush=True)


def carry(carrier: replication.ByteTransfer, group: Group) -> None:
    for _ in range(2):
        received = carrier.send(bytes_of(group.rank), (2, 2, 0)[group.rank])
        assert {rank: data.tolist() for rank, data in received.items()} == {
            rank: bytes_of(rank).tolist() for rank in {0: [2], 1: [], 2: [0, 1]}[group.rank]
        }
