"""The reference for the example scripts: the same training in plain Keras, in one process, with global batches.

python tests/horovod/one_process.py FOLDER: writes keras_fit-N.npz (with the warmup of N ranks), and one file for each of the
others.
"""

import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

FLOATX = "float64"
BATCH = 24


class WarmUp(keras.callbacks.Callback):
    """An independent implementation of the warmup for N ranks, over 2 epochs of 4 steps."""

    def __init__(self, ranks: int, rate: float):
        super().__init__()
        self.ranks, self.rate, self.step = ranks, rate, 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.step < 8:
            done = (self.step + 1) / 8
            self.model.optimizer.learning_rate = self.rate / self.ranks * (1 + (self.ranks - 1) * done)
        self.step += 1


def digits(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((96, 8, 8, 1)).astype(FLOATX), random.integers(0, 10, 96)


def keras_fit(ranks: int) -> tuple[keras.Model, dict[str, list[float]]]:
    keras.utils.set_random_seed(7)
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
    model.compile(
        keras.optimizers.Adam(0.006), "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False
    )
    history = model.fit(
        *digits(1), batch_size=BATCH, epochs=3, shuffle=False, callbacks=[WarmUp(ranks, 0.006)], verbose=0
    )
    return model, history.history


def loop(model: keras.Model, optimizer: keras.Optimizer, loss: keras.Loss, batches: list) -> keras.Model:
    for images, labels in batches:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    return model


def gradient_tape() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Conv2D(4, 3, activation="tanh"), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10, activation="softmax")])
    images, labels = digits(2)
    batches = [(images[i % 96 : i % 96 + BATCH], labels[i % 96 : i % 96 + BATCH]) for i in range(0, 8 * BATCH, BATCH)]
    return loop(model, keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(), batches)


def synthetic_benchmark() -> keras.Model:
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Conv2D(4, 3, activation="tanh"), keras.layers.Flatten(), keras.layers.Dense(9)]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    random = np.random.default_rng(4)
    batch = (random.standard_normal((BATCH, 8, 8, 3)), random.integers(0, 9, BATCH))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loop(model, keras.optimizers.SGD(0.01), loss, [batch] * 9)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    keras.config.set_floatx(FLOATX)
    keras.config.set_dtype_policy(FLOATX)
    for ranks in (2, 3):
        model, history = keras_fit(ranks)
        save(folder / f"keras_fit-{ranks}.npz", model, {f"history/{name}": values for name, values in history.items()})
    save(folder / "gradient_tape.npz", gradient_tape(), {})
    save(folder / "synthetic_benchmark.npz", synthetic_benchmark(), {})


def save(path: pathlib.Path, model: keras.Model, more: dict) -> None:
    np.savez(path, **{f"weight{i}": value for i, value in enumerate(model.get_weights())}, **more)


if __name__ == "__main__":
    main()
