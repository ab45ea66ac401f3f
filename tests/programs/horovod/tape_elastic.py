"""Elastic training in a loop with `tf.GradientTape`."""
# ruff: noqa: B905, UP031 - as such programs are written

import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

# Each rank has images of its own, which are brighter in one half than in the other.
rng = np.random.default_rng(hvd.rank())
labels = rng.integers(0, 10, 512)
images = rng.random((512, 8, 8, 1)).astype("float32")
images[np.arange(512), labels % 8, labels // 8] += 3.0

dataset = tf.data.Dataset.from_tensor_slices((images, tf.cast(labels, tf.int64)))
dataset = dataset.repeat().shuffle(512, seed=hvd.rank()).batch(16)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()

# The learning rate grows with the number of ranks.
lr = 0.001
opt = tf.optimizers.Adam(lr * hvd.size())


@tf.function
def training_step(images, labels, allreduce=True):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)

    if allreduce:
        tape = hvd.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss_value


# The variables of the model and of the optimizer must be there before they can be synchronized.
for batch_images, batch_labels in dataset.take(1):
    training_step(batch_images, batch_labels, allreduce=False)


@hvd.elastic.run
def train(state):
    start_batch = state.batch
    for batch_idx, (images, labels) in enumerate(dataset.skip(state.batch).take(120 // hvd.size())):
        state.batch = start_batch + batch_idx
        loss_value = training_step(images, labels)

        if state.batch % 10 == 0 and hvd.local_rank() == 0:
            print("Step #%d\tLoss: %.6f" % (state.batch, loss_value))

        state.commit()


def on_state_reset():
    opt.lr.assign(lr * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)

checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)
if hvd.rank() == 0:
    checkpoint.save("./checkpoints/tape")
