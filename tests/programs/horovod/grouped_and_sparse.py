"""Word vectors by skip-grams: gradients that are a few rows of a table; and operations on several tensors at once."""
# ruff: noqa: B905, UP031 - as such programs are written

import collections

import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd

vocabulary_size = 2000
embedding_size = 16
batch_size = 64
skip_window = 1
num_sampled = 8

hvd.init()

# A text of numbers in place of Wikipedia: each word is followed by its successor most of the time. Each rank reads on from
# another place.
rng = np.random.default_rng(1)
steps = np.where(rng.random(20000) < 0.9, 1, rng.integers(2, 50, 20000))
text = np.cumsum(steps) % 100
data = np.roll(text, -hvd.rank() * len(text) // hvd.size())
print("Most common words", collections.Counter(data.tolist()).most_common(3))


def generate_batch(number):
    """A word and one that is next to it, for each row of a batch."""
    start = number * batch_size % (len(data) - batch_size - skip_window)
    words = data[start : start + batch_size]
    return words.astype("int64"), data[start + skip_window : start + skip_window + batch_size, None].astype("int64")


embeddings = tf.Variable(tf.random.uniform([vocabulary_size, embedding_size], -0.1, 0.1))
nce_weights = tf.Variable(tf.random.truncated_normal([vocabulary_size, embedding_size], stddev=0.1))
nce_biases = tf.Variable(tf.zeros([vocabulary_size]))
variables = [embeddings, nce_weights, nce_biases]
opt = tf.optimizers.Adagrad(0.5 * hvd.size())


@tf.function
def training_step(inputs, labels):
    with tf.GradientTape() as tape:
        embed = tf.nn.embedding_lookup(embeddings, inputs)
        loss = tf.reduce_mean(
            tf.nn.nce_loss(
                weights=nce_weights,
                biases=nce_biases,
                labels=labels,
                inputs=embed,
                num_sampled=num_sampled,
                num_classes=vocabulary_size,
            )
        )
    tape = hvd.DistributedGradientTape(tape)
    opt.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss


hvd.broadcast_variables(variables, root_rank=0)

average_loss = 0
num_steps = 200 // hvd.size()
for step in range(num_steps):
    average_loss += training_step(*generate_batch(step))
    if step == 0:
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    if (step + 1) % (num_steps // 5) == 0:
        # The ranks' mean, and how many pairs they have seen.
        seen = tf.constant([float(batch_size * (step + 1))])
        [total], average_loss = hvd.grouped_allreduce([seen, average_loss / (num_steps // 5)], op=hvd.Sum)
        if hvd.rank() == 0:
            print("Average loss after %d pairs: %.4f" % (total, average_loss / hvd.size()))
        average_loss = 0

# What the ranks have looked up most often, as slices of the table.
counts = tf.IndexedSlices(tf.ones([3], tf.int64), tf.constant([1, 2, 3 + hvd.rank()]), [vocabulary_size])
summed = tf.convert_to_tensor(hvd.allreduce(counts, op=hvd.Sum))
assert summed.dtype == tf.int64 and int(tf.reduce_sum(summed)) == 3 * hvd.size()

checkpoint = tf.train.Checkpoint(embeddings=embeddings)
if hvd.rank() == 0:
    checkpoint.save("./checkpoints/vectors")
