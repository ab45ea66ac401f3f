"""A program that passes data in Keras's forms to `Trainer.fit` on several processes."""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.errors import InputError

strategy = tfdist.load_strategy(sys.argv[1])
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((70, 4)), RANDOM.standard_normal((70, 1))
ROWS = tf.data.Dataset.from_tensor_slices((X, Y))
keras.config.set_floatx("float64")


class Batches(keras.utils.PyDataset):
    """Seven batches of ten rows, which epochs shuffle."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return X[10 * index : 10 * index + 10], Y[10 * index : 10 * index + 10]


def seeded():
    """Returns batches that are shuffled in the same way on every process."""
    keras.utils.set_random_seed(3)
    return ROWS.shuffle(70).batch(10)


def train(name, data, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.1), loss="mse")
    try:
        history = trainer.fit(data, epochs=3, verbose=0, **options)
        print(f"{name}: {history.history['loss'][-1]:.12f} {float(sum(np.sum(w) for w in model.get_weights())):.12f}")
    except InputError as error:
        print(f"{name}: {error}")


train("PyDataset", Batches())
train("seeded", seeded())
keras.utils.set_random_seed(3)
train("in order", ROWS.batch(10))
tf.random.set_seed(strategy.cluster.rank)
train("shuffled", ROWS.shuffle(70).batch(10))
tf.random.set_seed(strategy.cluster.rank)
train("examples shuffled", ROWS.shuffle(70))
train("sharded", ROWS.shard(2, strategy.cluster.rank % 2).batch(5))
shard = ROWS.shard(2, strategy.cluster.rank % 2).batch(5)
train("validated by shards", ROWS.batch(10), validation_data=shard)
strategy.group.leave()
strategy.close()
