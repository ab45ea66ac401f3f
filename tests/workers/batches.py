"""Reads the batches of a folder of images with augmentation, as this process's replicas get them."""

import pathlib

import numpy as np

import tfdist
from tfdist.data import Pipeline, augmented, load


def work(strategy: tfdist.Strategy, folder: pathlib.Path, steps: str, first: str = "0") -> list[dict[int, tuple]]:
    """Returns x and y of each replica of this process, by its number, for each step."""
    source = augmented(load(f"images:{folder / 'colors'}(size=5)").train, "flip|crop(padding=1)|contrast|erase")
    iterator = iter(strategy.distribute(Pipeline(source, 5, seed=3, first=int(first)).dataset))
    found = []
    for _ in range(int(steps)):
        parts = tuple(strategy.local(leaf) for leaf in next(iterator))
        replicas = strategy.local_replicas
        found.append({r: tuple(np.asarray(part[i]) for part in parts) for i, r in enumerate(replicas)})
    return found
