"""A training loop of your own, on `Strategy` and `Collectives` alone, that measures what a `Trainer` does not.

    python examples/custom_loop.py [STEPS] [STRATEGY]

It prints the gradient noise scale (McCandlish et al., 2018, "An Empirical Model of Large-Batch Training", appendix A):
the batch size beyond which more examples a step, and so more replicas, bring little. It needs the norm of each replica's
own gradient beside that of the sum, so it cannot be seen from outside of the step. N replicas, N > 1.
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
    # Divided by the size of the global batch, so that the replicas' losses and gradients are summed, never averaged.
    return tf.reduce_sum(values) / BATCH_SIZE, None


def replica_step(x, y):
    mine, loss, _ = strategy.gradients(loss_fn, model.trainable_variables, x, y)
    my_square = tf.square(tf.linalg.global_norm(mine) * replicas)  # of the mean over this replica's examples
    *whole, loss, squares = collectives.all_reduce([*mine, loss, my_square], name="step")
    # Not optimizer.apply: under tf.distribute it would sum the gradients over replicas once more.
    strategy.apply(optimizer, whole, model.trainable_variables)
    return loss, squares / replicas, tf.square(tf.linalg.global_norm(whole))


# Step k's batch depends on the seed and k alone; each replica gets its rows of it.
batches = strategy.distribute(tfdist.data.Pipeline(digits.train, BATCH_SIZE, seed=0).dataset)


@tf.function(autograph=False)
def step():
    return [strategy.local(value)[0] for value in strategy.run(replica_step, *next(batches))]


small, big = BATCH_SIZE / replicas, BATCH_SIZE
noise = signal = 0.0
for k in range(1, STEPS + 1):
    loss, square_small, square_big = (float(value) for value in step())
    # Unbiased, but of one step they are mostly noise themselves: their sums are divided, not they.
    noise += (square_small - square_big) / (1 / small - 1 / big)
    signal += (big * square_big - small * square_small) / (big - small)
    if strategy.is_chief and k % max(STEPS // 5, 1) == 0:
        print(f"step {k}  loss {loss:.4f}  noise scale {noise / signal:.0f} examples", flush=True)

strategy.group.leave()
strategy.close()
