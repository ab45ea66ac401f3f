"""Intent classification with a metric that returns the F1 score of each class, and a loss with weights for the classes."""

import argparse

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

CLASSES = ["greeting", "order", "complaint", "goodbye"]


class ClasswiseF1(keras.metrics.Metric):
    """F1 of each class and their mean, from counts over the whole epoch."""

    def __init__(self, class_names, name="f1", **kwargs):
        super().__init__(name=name, **kwargs)
        self.class_names = class_names
        n = len(class_names)
        self.tp = self.add_weight(name="tp", shape=(n,), initializer="zeros")
        self.fp = self.add_weight(name="fp", shape=(n,), initializer="zeros")
        self.fn = self.add_weight(name="fn", shape=(n,), initializer="zeros")
        self.batches = self.add_weight(name="batches", shape=(), initializer="zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        n = len(self.class_names)
        y_true = tf.one_hot(tf.cast(tf.reshape(y_true, (-1,)), tf.int32), n, dtype=self.dtype)
        y_pred = tf.one_hot(tf.argmax(y_pred, axis=-1), n, dtype=self.dtype)
        if sample_weight is not None:
            weight = tf.cast(tf.reshape(sample_weight, (-1, 1)), self.dtype)
        else:
            weight = tf.ones((tf.shape(y_true)[0], 1), dtype=self.dtype)
        self.tp.assign_add(tf.reduce_sum(weight * y_true * y_pred, axis=0))
        self.fp.assign_add(tf.reduce_sum(weight * (1 - y_true) * y_pred, axis=0))
        self.fn.assign_add(tf.reduce_sum(weight * y_true * (1 - y_pred), axis=0))
        self.batches.assign_add(1)

    def result(self):
        tp, fp, fn = (tf.convert_to_tensor(v) for v in (self.tp, self.fp, self.fn))
        f1 = tf.math.divide_no_nan(2 * tp, 2 * tp + fp + fn)
        scores = {f"{self.name}_{name}": f1[i] for i, name in enumerate(self.class_names)}
        scores[f"{self.name}_macro"] = tf.reduce_mean(f1)
        return scores

    def reset_state(self):
        for v in self.variables:
            v.assign(tf.zeros(v.shape, dtype=v.dtype))


def weighted_crossentropy(class_weights):
    """Each row counts by its class; divided by the sum of the weights in the batch, as torch does it."""
    class_weights = tf.constant(class_weights, dtype=keras.config.floatx())

    def loss(y_true, y_pred):
        y_true = tf.cast(tf.reshape(y_true, (-1,)), tf.int32)
        weights = tf.gather(class_weights, y_true)
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return tf.reduce_sum(weights * losses) / tf.reduce_sum(weights)

    return loss


def make_sentences(n, rng):
    """Word numbers: each class has words of its own, the rest is filler."""
    labels = rng.choice(len(CLASSES), n, p=[0.5, 0.3, 0.15, 0.05])
    words = rng.integers(1, 40, size=(n, 8))
    own = rng.random((n, 8)) < 0.25
    words[own] = (40 + 5 * labels[:, None] + rng.integers(0, 5, (n, 8)))[own]
    return words.astype("int32"), labels.astype("int32")


class F1Callback(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        scores = {k: round(float(v), 4) for k, v in logs.items() if "f1" in k and not k.startswith("val_")}
        print(f"epoch {epoch + 1}: {scores}")


def main(args):
    keras.utils.set_random_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    x, y = make_sentences(300, rng)
    x_val, y_val = make_sentences(75, rng)

    train_ds = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .cache()
        .shuffle(len(x), seed=args.seed, reshuffle_each_iteration=True)
        .repeat()
        .batch(args.batch_size)
        .prefetch(tf.data.AUTOTUNE)
    )
    val_ds = tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(2 * args.batch_size).cache()

    counts = np.bincount(y, minlength=len(CLASSES))
    class_weights = len(y) / (len(CLASSES) * np.maximum(counts, 1))

    model = keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            layers.Embedding(60, 12),
            layers.SpatialDropout1D(0.1),
            layers.GlobalAveragePooling1D(),
            layers.Dense(16, activation="relu"),
            layers.Dense(len(CLASSES)),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Nadam(args.lr),
        loss=weighted_crossentropy(class_weights),
        metrics=[ClasswiseF1(CLASSES), "accuracy"],
    )
    history = model.fit(
        train_ds,
        steps_per_epoch=len(x) // args.batch_size,
        epochs=args.epochs,
        validation_data=val_ds,
        callbacks=[F1Callback()],
        verbose=0,
    )
    print("class weights:", class_weights)
    for name, values in sorted(history.history.items()):
        print(name, [float(v) for v in values])
    print("evaluate:", {k: float(v) for k, v in model.evaluate(val_ds, return_dict=True, verbose=0).items()})
    print("predicted classes:", np.bincount(model.predict(val_ds, verbose=0).argmax(-1), minlength=len(CLASSES)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=28)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=8)
    main(parser.parse_args())
