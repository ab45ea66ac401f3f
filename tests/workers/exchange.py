"""Exchanges uneven rows.

The directory contains cases.pickle: by name, the splits [sender, receiver] and the arrays of each sender. Returns the arrays
that were received, eagerly and in a step that runs twice; "sums" are sums of tensors of several dtypes in one call.
"""

import pathlib
import pickle

import numpy as np
import tensorflow as tf

import tfdist

SUMMED = ("float32", "float64", "int32", "float32")


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> list[dict[str, list[np.ndarray]]]:
    rank = strategy.cluster.rank
    cases = pickle.loads((directory / "cases.pickle").read_bytes())

    def exchange() -> dict[str, list[tf.Tensor]]:
        summed = [tf.fill([2], tf.cast(rank + 1, dtype)) for dtype in SUMMED]
        sums = {"sums": strategy.collectives.all_reduce(summed, name="sums")}
        return sums | {
            case: strategy.collectives.all_to_all(
                [tf.constant(array) for array in arrays[rank]], name=case, splits=tf.constant(table[rank])
            )
            for case, (table, arrays) in cases.items()
        }

    compiled = tf.function(lambda: strategy.run(exchange), autograph=False)
    results = [strategy.run(exchange), compiled(), compiled()]
    return [tf.nest.map_structure(lambda tensor: strategy.local(tensor)[0].numpy(), result) for result in results]
