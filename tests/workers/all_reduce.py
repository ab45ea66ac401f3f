"""Sums by every algorithm, repeatedly, and trains a few steps with each; the strategy must have been started with `auto`.

Returns by algorithm: the bytes of the sums of each repeat, in float32 and float64, with the engine's, and the weights.
"""

import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist import models
from tfdist.collectives.all_reduce_algorithms import possible_algorithms
from tfdist.config.all_reduce import AlgorithmTable

SIZES = (1, 7, 3000)
REPEATS = 3


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> dict[str, Any]:
    planned = strategy.tuned_collectives
    found = {}
    for name in possible_algorithms(planned.topology):
        strategy.tuned_collectives = planned.with_table(AlgorithmTable.uniform(name))
        found[name] = {"sums": _sums(strategy), "weights": _weights(strategy)}
    return found


def _sums(strategy: tfdist.Strategy) -> list[list[np.ndarray]]:
    rank = strategy.cluster.rank
    data = [np.random.default_rng([rank, size]).standard_normal(size) for size in SIZES]

    def replica(one: tf.Tensor) -> list[tf.Tensor]:
        own = [tf.constant(values) * one for values in data]
        single = [tf.cast(values, tf.float32) for values in own]
        sums = strategy.step_collectives.all_reduce([*own, single[2]], name="sums")
        [alone] = strategy.step_collectives.all_reduce([single[1]], "mean", name="mean")
        return [*sums, alone, *strategy.collectives.all_reduce(own, name="engine")]

    step = tf.function(lambda one: strategy.run(replica, one), autograph=False)
    return [[strategy.local(x)[0].numpy() for x in step(tf.constant(1.0, tf.float64))] for _ in range(REPEATS)]


def _weights(strategy: tfdist.Strategy) -> list[np.ndarray]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    numbers = np.random.default_rng(2)
    data = numbers.standard_normal((60, 8, 8, 1)).astype("float32"), numbers.integers(0, 10, 60)
    with strategy.scope():
        trainer = tfdist.Trainer(
            models.build("mlp(hidden=(30, 30))", (8, 8, 1), 10),
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    trainer.fit(
        data, batch_size=20, steps=5, schedule=tfdist.Schedule(steps_per_call=2), checks=tfdist.Checks(measure_every=0)
    )
    return [np.asarray(variable) for variable in trainer.model.weights]
