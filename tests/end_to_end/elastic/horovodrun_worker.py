"""One rank of an elastic job of horovodrun, with the drop-in import: trains until there were two ranks for a few steps.

python tests/end_to_end/elastic/horovodrun_worker.py FOLDER

It touches FOLDER/begun once it trains, and prints its results as JSON.
"""

import json
import pathlib
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd

STEPS_TOGETHER = 4


def main() -> None:
    hvd.init()
    keras.utils.set_random_seed(hvd.size())  # a new rank has other initial weights
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    weight, table = tf.Variable([0.0]), tf.Variable(tf.zeros([1000, 4]))

    @tf.function
    def gradients(x: tf.Tensor) -> list[tf.Tensor]:
        """Returns gradients of a variable and of a row of a table, a mean of slices, rank and size. Traced once."""
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(weight * x) + tf.reduce_sum(tf.gather(table, [1])) * x
        dense, rows = tape.gradient(loss, [weight, table])
        slices = hvd.allreduce(tf.IndexedSlices([x], [0], [1]))
        numbers = [tf.cast(number, tf.float32) for number in (hvd.rank_op(), hvd.size_op())]
        return [dense[0], tf.convert_to_tensor(rows)[1, 0], tf.reduce_sum(slices.values), *numbers]

    state = hvd.elastic.KerasState(model, together=0)
    resets = []

    def on_state_reset() -> None:
        resets.append(hvd.size())
        tf.keras.backend.set_value(model.optimizer.lr, 0.1 * hvd.size())

    state.register_reset_callbacks([on_state_reset])
    found: list[Any] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.together < STEPS_TOGETHER:
            found[:] = [float(x) for x in gradients(tf.constant(1.0 + 2 * hvd.rank()))]
            model.fit(np.ones((4, 3)) * (1 + hvd.rank()), np.ones((4, 2)), batch_size=4, verbose=0)
            state.together += hvd.size() == 2
            pathlib.Path(sys.argv[1], "begun").touch()
            time.sleep(0.02)
            state.commit()

    train(state)
    weights = [value.tobytes().hex() for value in model.get_weights()]
    rate = float(model.optimizer.learning_rate)
    print("\n" + json.dumps({"rank": hvd.rank(), "found": found, "resets": resets, "weights": weights, "rate": rate}))


if __name__ == "__main__":
    main()
