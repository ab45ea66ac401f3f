"""Elastic training by Keras's `fit`."""
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

# Images of 8 x 8 in place of MNIST: one bright pixel says which digit it is.
rng = np.random.default_rng(hvd.rank())
mnist_labels = rng.integers(0, 10, 512)
mnist_images = 80 * rng.random((512, 8, 8))
mnist_images[np.arange(512), mnist_labels % 8, mnist_labels // 8] = 255

dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(mnist_images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(mnist_labels, tf.int64))
)
dataset = dataset.repeat().shuffle(512).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)

# The learning rate grows with the number of ranks.
lr = 0.003
opt = tf.optimizers.Adam(lr * hvd.size())
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)

model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

# The variables of the model and of the optimizer must be there before they can be synchronized.
model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)

state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset():
    tf.keras.backend.set_value(state.model.optimizer.lr, lr * hvd.size())
    # Once more, so that ranks that are new make the same calls.
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)


state.register_reset_callbacks([on_state_reset])

callbacks = [
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]

# Only one rank writes checkpoints.
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))


@hvd.elastic.run
def train(state):
    state.model.fit(
        dataset,
        steps_per_epoch=40 // hvd.size(),
        epochs=4 - state.epoch,
        callbacks=callbacks,
        verbose=1 if hvd.rank() == 0 else 0,
    )


train(state)
