"""Digits with a loop and a gradient tape, as in Horovod's example for TensorFlow 2. Only the import line differs."""

import argparse

import keras
import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=24, help="global batch size")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--rate", type=float, default=0.1)
parser.add_argument("--floatx", default="float32")
parser.add_argument("--output", default="", help="file for the weights of this rank; {rank} is replaced with the rank")
args = parser.parse_args()

# Horovod: initialize.
hvd.init()

keras.config.set_floatx(args.floatx)
keras.config.set_dtype_policy(args.floatx)
keras.utils.set_random_seed(3)

random = np.random.default_rng(2)
images = random.standard_normal((96, 8, 8, 1)).astype(args.floatx)
labels = random.integers(0, 10, 96)
mine = slice(hvd.rank(), None, hvd.size())
dataset = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine]))
dataset = dataset.batch(args.batch_size // hvd.size()).repeat()

mnist_model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 3, activation="tanh"),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy()
opt = keras.optimizers.SGD(args.rate, momentum=0.9)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)

    # Horovod: the distributed tape.
    tape = hvd.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables, strict=True))

    # Horovod: all ranks continue with the variables of rank 0, once those of the optimizer exist.
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)

    return loss_value


for batch, (images, labels) in enumerate(dataset.take(args.steps)):
    loss_value = training_step(images, labels, batch == 0)
    if batch % 4 == 0 and hvd.rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")

if args.output:
    weights = {f"weight{i}": value for i, value in enumerate(mnist_model.get_weights())}
    np.savez(args.output.format(rank=hvd.rank()), **weights)
