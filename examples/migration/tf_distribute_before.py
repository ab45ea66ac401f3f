"""As in TensorFlow's multi-worker tutorial: each process that TF_CONFIG names runs this. It fails on two processes.

tfdist launch --processes=2 -- python examples/migration/tf_distribute_before.py [EPOCHS]
"""

import json
import os
import sys

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
WORKERS = len(json.loads(os.environ.get("TF_CONFIG", '{"cluster": {"worker": [""]}}'))["cluster"]["worker"])
BATCH_SIZE = 64 // WORKERS * WORKERS  # of all workers together


def digits() -> tf.data.Dataset:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat().batch(BATCH_SIZE)


def network() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


keras.utils.set_random_seed(0)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = network()
history = model.fit(digits(), epochs=EPOCHS, steps_per_epoch=25, verbose=0).history
print(json.dumps(history))
