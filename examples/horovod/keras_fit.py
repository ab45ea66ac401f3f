"""Digits with `model.fit`, as in Horovod's example for Keras. Only the import line differs."""

import argparse

import keras
import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=24, help="global batch size")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--base_rate", type=float, default=0.002, help="learning rate of one rank")
parser.add_argument("--warmup_epochs", type=int, default=2)
parser.add_argument("--plain", action="store_true", help="no callbacks, and the same initial weights on every rank")
parser.add_argument("--floatx", default="float32")
parser.add_argument(
    "--output", default="", help="file for the weights and history of this rank; {rank} is replaced with the rank"
)
args = parser.parse_args()

# Horovod: initialize.
hvd.init()

# Horovod: pin the GPU of this process.
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

keras.config.set_floatx(args.floatx)
keras.config.set_dtype_policy(args.floatx)
keras.utils.set_random_seed(7 if args.plain else 7 + hvd.rank())

# Images of 8 x 8 and their labels. Each rank takes its rows.
random = np.random.default_rng(1)
images = random.standard_normal((96, 8, 8, 1)).astype(args.floatx)
labels = random.integers(0, 10, 96)
mine = slice(hvd.rank(), None, hvd.size())
dataset = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine])).batch(args.batch_size // hvd.size())

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 3, activation="tanh"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)

# Horovod: scale the learning rate by the number of ranks.
scaled_rate = args.base_rate * hvd.size()
opt = keras.optimizers.Adam(scaled_rate)

# Horovod: the distributed optimizer.
opt = hvd.DistributedOptimizer(opt)
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = []
if not args.plain:
    callbacks = [
        # Horovod: all ranks start with the variables of rank 0.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Horovod: average metrics over all ranks before other callbacks read them.
        hvd.callbacks.MetricAverageCallback(),
        # Horovod: warm up to the scaled learning rate.
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_rate, warmup_epochs=args.warmup_epochs, verbose=1),
    ]

verbose = 2 if hvd.rank() == 0 else 0
history = model.fit(dataset, callbacks=callbacks, epochs=args.epochs, verbose=verbose)

if args.output:
    weights = {f"weight{i}": value for i, value in enumerate(model.get_weights())}
    np.savez(args.output.format(rank=hvd.rank()), **weights, **{f"history/{k}": v for k, v in history.history.items()})
