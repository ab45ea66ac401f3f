"""A custom training loop that uses only `Strategy` and `Collectives`, and measures what a `Trainer` does not.

    python examples/custom_loop.py [STEPS] [STRATEGY]

It prints the gradient noise scale (McCandlish et al., 2018, "An Empirical Model of Large-Batch Training", appendix A):
the batch size beyond which more examples per step, and so more replicas, gain little. It needs the gradient norm of each
replica as well as that of the sum, so it cannot be measured outside the step. Requires more than one replica.
"""

import sys

import keras
import tensorflow as tf

import tfdist

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
NAME = sys.argv[2] if len(sys.argv) > 2 else "mirrored"
BATCH_SIZE = 64  # of all replicas together

strategy = tfdist.load_strategy(NAME, **({"devices": 2} if NAME == "mirrored" else {}))
collectives, replicas = strategy.collectives, strategy.replicas
digits = tfdist.data.load("digits")

keras.utils.set_random_seed(0)
with strategy.scope():
    model = tfdist.models.build("mlp", digits.input_shape, digits.classes)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
strategy.synchronize([*model.variables, *optimizer.variables])


def loss_fn(x, y):
    values = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
    # Divided by the size of the global batch, so that losses and gradients of replicas are summed, not averaged.
    return tf.reduce_sum(values) / BATCH_SIZE, None


def replica_step(x, y):
    mine, loss, _ = strategy.gradients(loss_fn, model.trainable_variables, x, y)
    my_square = tf.square(tf.linalg.global_norm(mine) * replicas)  # of the mean over this replica's examples
    *whole, loss, squares = collectives.all_reduce([*mine, loss, my_square], name="step")
    # Not optimizer.apply: under tf.distribute it would sum the gradients over replicas once more.
    strategy.apply(optimizer, whole, model.trainable_variables)
    return loss, squares / replicas, tf.square(tf.linalg.global_norm(whole))


# The batch of step k depends only on the seed and k; each replica gets its rows.
batches = strategy.distribute(tfdist.data.Pipeline(digits.train, BATCH_SIZE, seed=0).dataset)


@tf.function(autograph=False)
def step():
    return [strategy.local(value)[0] for value in strategy.run(replica_step, *next(batches))]


small, big = BATCH_SIZE / replicas, BATCH_SIZE
noise = signal = 0.0
for k in range(1, STEPS + 1):
    loss, square_small, square_big = (float(value) for value in step())
    # Unbiased, but estimates from one step are mostly noise, so their sums are divided.
    noise += (square_small - square_big) / (1 / small - 1 / big)
    signal += (big * square_big - small * square_small) / (big - small)
    if strategy.is_chief and k % max(STEPS // 5, 1) == 0:
        print(f"step {k}  loss {loss:.4f}  noise scale {noise / signal:.0f} examples", flush=True)

strategy.group.leave()
strategy.close()
