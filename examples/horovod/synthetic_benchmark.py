"""Images per second on random data, as in Horovod's synthetic benchmark. Only the import line differs."""

import argparse
import timeit

import keras
import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument("--batch-size", type=int, default=24, help="global batch size")
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=2)
parser.add_argument("--floatx", default="float32")
parser.add_argument("--output", default="", help="file for the weights of this rank; {rank} is replaced with the rank")
args = parser.parse_args()

hvd.init()

keras.config.set_floatx(args.floatx)
keras.config.set_dtype_policy(args.floatx)
keras.utils.set_random_seed(5)

model = keras.Sequential(
    [
        keras.Input((8, 8, 3)),
        keras.layers.Conv2D(4, 3, activation="tanh"),
        keras.layers.Flatten(),
        keras.layers.Dense(9),
    ]
)
opt = keras.optimizers.SGD(0.01)

random = np.random.default_rng(4)
mine = slice(hvd.rank(), None, hvd.size())
data = tf.constant(random.standard_normal((args.batch_size, 8, 8, 3))[mine], args.floatx)
target = tf.constant(random.integers(0, 9, args.batch_size)[mine])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# Horovod: the dtype in which gradients are sent.
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


@tf.function
def benchmark_step(first_batch):
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss_value = loss(target, probs)

    # Horovod: the distributed tape.
    tape = hvd.DistributedGradientTape(tape, compression=compression)

    gradients = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)


def log(text):
    if hvd.rank() == 0:
        print(text)


log(f"Batch size: {args.batch_size}")
log(f"Number of ranks: {hvd.size()}")
benchmark_step(first_batch=True)
timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_warmup_batches)
rates = []
for _ in range(args.num_iters):
    seconds = timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_batches_per_iter)
    rates.append(args.batch_size * args.num_batches_per_iter / seconds)
log(f"Images per second on all ranks: {np.mean(rates):.1f} +- {1.96 * np.std(rates):.1f}")

if args.output:
    weights = {f"weight{i}": value for i, value in enumerate(model.get_weights())}
    np.savez(args.output.format(rank=hvd.rank()), **weights)
