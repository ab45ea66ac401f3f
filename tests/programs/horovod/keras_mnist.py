"""Keras's `fit` with callbacks: a scaled rate, a warmup, checkpoints of rank 0."""
# ruff: noqa: B905, UP031 - as such programs are written

import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd


def load_data(seed):
    """Images of 8 x 8 in place of MNIST: one bright pixel says which digit it is."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, 512)
    images = 80 * rng.random((512, 8, 8))
    images[np.arange(512), labels % 8, labels // 8] = 255
    return images, labels


def train():
    hvd.init()

    # One GPU for each process.
    gpus = tf.config.experimental.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    mnist_images, mnist_labels = load_data(seed=hvd.rank())
    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.cast(mnist_images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(mnist_labels, tf.int64))
    )
    dataset = dataset.repeat().shuffle(512).batch(32)

    mnist_model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
            tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
            tf.keras.layers.Dropout(0.1),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )

    # The learning rate grows with the number of ranks.
    scaled_lr = 0.004 * hvd.size()
    opt = tf.optimizers.Adam(scaled_lr)
    opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)

    mnist_model.compile(
        loss=tf.losses.SparseCategoricalCrossentropy(),
        optimizer=opt,
        metrics=["accuracy"],
        experimental_run_tf_function=False,
    )

    callbacks = [
        # All ranks begin with the variables of rank 0.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Before all callbacks that read the metrics of an epoch.
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
    ]

    # Only one rank writes checkpoints.
    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))

    verbose = 1 if hvd.rank() == 0 else 0
    mnist_model.fit(dataset, steps_per_epoch=40 // hvd.size(), callbacks=callbacks, epochs=4, verbose=verbose)
    return mnist_model


if __name__ == "__main__":
    train()
