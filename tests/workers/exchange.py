"""Exchanges uneven rows.

The directory contains cases.pickle: by name, the splits [sender, receiver] and the arrays of each sender. Returns the arrays
that were received, eagerly and in a step that runs twice; "sums" are sums of tensors of several dtypes in one call, and
"weights", those of a model of bfloat16, other ones on each rank at first, after 0 to 2 steps.
"""

import pathlib
import pickle

import keras
import numpy as np
import tensorflow as tf

import tfdist

SUMMED = ("float32", "float64", "int32", "float32", "bfloat16")


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
    read = [tf.nest.map_structure(lambda tensor: strategy.local(tensor)[0].numpy(), result) for result in results]
    return [result | {"weights": weights} for result, weights in zip(read, _weights_of_bfloat16(strategy), strict=True)]


def _weights_of_bfloat16(strategy: tfdist.Strategy) -> list[list[np.ndarray]]:
    keras.utils.set_random_seed(strategy.cluster.rank)
    with strategy.scope():
        layers = [keras.Input((2,)), keras.layers.Dense(4, dtype="bfloat16"), keras.layers.Dense(4)]
        trainer = tfdist.Trainer(keras.Sequential(layers), optimizer=keras.optimizers.SGD(0.1), loss="mse")
    data = np.arange(12, dtype="float32").reshape(6, 2), np.ones([6, 4], "float32")
    trainer.build(data)
    weights = []
    for _ in range(3):
        weights.append([np.asarray(variable) for variable in trainer.model.trainable_variables])
        trainer.fit(*data, batch_size=6, steps=1, verbose=0)
    return weights
