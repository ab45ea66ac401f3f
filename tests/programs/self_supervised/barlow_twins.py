"""Barlow Twins: self-supervised learning that reduces the redundancy of the features."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)

BATCH_SIZE = 40
IMAGE_SIZE = 12
AUTO = tf.data.AUTOTUNE

rng = np.random.default_rng(0)
patterns = rng.integers(0, 200, size=(5, IMAGE_SIZE, IMAGE_SIZE, 3))
labels = rng.integers(0, 5, size=(230, 1))
features = patterns[labels[:, 0]] + rng.integers(0, 56, size=(230, IMAGE_SIZE, IMAGE_SIZE, 3))
train_features, test_features = features[:180] / 255, features[180:] / 255
train_labels, test_labels = labels[:180], labels[180:]


class Augmentation(layers.Layer):
    """Base augmentation class, with a method which does something only with a certain probability."""

    @tf.function
    def random_execute(self, prob: float) -> bool:
        return tf.random.uniform([], minval=0, maxval=1) < prob


class RandomToGrayscale(Augmentation):
    @tf.function
    def call(self, x: tf.Tensor) -> tf.Tensor:
        if self.random_execute(0.2):
            x = tf.image.rgb_to_grayscale(x)
            x = tf.tile(x, [1, 1, 1, 3])
        return x


class RandomColorJitter(Augmentation):
    @tf.function
    def call(self, x: tf.Tensor) -> tf.Tensor:
        if self.random_execute(0.8):
            x = tf.image.random_brightness(x, 0.2)
            x = tf.image.random_contrast(x, 0.6, 1.4)
            x = tf.clip_by_value(x, 0, 1)
        return x


class RandomAugmentor(keras.Model):
    def __init__(self):
        super().__init__()
        self.random_flip = layers.RandomFlip("horizontal")
        self.random_color_jitter = RandomColorJitter()
        self.random_to_grayscale = RandomToGrayscale()

    def call(self, x):
        x = self.random_flip(x, training=True)
        x = self.random_color_jitter(x)
        x = self.random_to_grayscale(x)
        return tf.clip_by_value(x, 0, 1)


bt_augmentor = RandomAugmentor()


class BTDatasetCreator:
    """Makes the dataset of pairs of augmented versions of the same images."""

    def __init__(self, seed: int = 1024):
        self.seed = seed

    def augmented_version(self, ds: list) -> tf.data.Dataset:
        return (
            tf.data.Dataset.from_tensor_slices(ds)
            .shuffle(1000, seed=self.seed)
            .batch(BATCH_SIZE, drop_remainder=True)
            .map(bt_augmentor)
        )

    def __call__(self, ds: list) -> tf.data.Dataset:
        a1 = self.augmented_version(ds)
        a2 = self.augmented_version(ds)
        return tf.data.Dataset.zip((a1, a2)).prefetch(AUTO)


augment_versions = BTDatasetCreator()(train_features)


class BarlowLoss(keras.losses.Loss):
    """Wants the cross-correlation matrix of two embeddings over the batch to be the identity."""

    def __init__(self, batch_size: int):
        super().__init__()
        self.lambda_amt = 5e-3
        self.batch_size = batch_size

    def get_off_diag(self, c: tf.Tensor) -> tf.Tensor:
        zero_diag = tf.zeros(c.shape[-1], dtype=c.dtype)
        return tf.linalg.set_diag(c, zero_diag)

    def cross_corr_matrix_loss(self, c: tf.Tensor) -> tf.Tensor:
        # subtracts diagonals by one and squares them
        c_diff = tf.pow(tf.linalg.diag_part(c) - 1, 2)
        # takes off diagonal, squares it, multiplies with lambda
        off_diag = tf.pow(self.get_off_diag(c), 2) * self.lambda_amt
        return tf.reduce_sum(c_diff) + tf.reduce_sum(off_diag)

    def normalize(self, output: tf.Tensor) -> tf.Tensor:
        return (output - tf.reduce_mean(output, axis=0)) / tf.math.reduce_std(output, axis=0)

    def cross_corr_matrix(self, z_a_norm: tf.Tensor, z_b_norm: tf.Tensor) -> tf.Tensor:
        return (tf.transpose(z_a_norm) @ z_b_norm) / self.batch_size

    def call(self, z_a: tf.Tensor, z_b: tf.Tensor) -> tf.Tensor:
        z_a_norm, z_b_norm = self.normalize(z_a), self.normalize(z_b)
        c = self.cross_corr_matrix(z_a_norm, z_b_norm)
        return self.cross_corr_matrix_loss(c)


def build_twin() -> keras.Model:
    """The encoder, and a projector over it."""
    i = layers.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(i)
    x = layers.Conv2D(16, 3, strides=2, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    x = layers.Flatten(name="bottleneck")(x)
    for _ in range(2):
        x = layers.Dense(16, use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("relu")(x)
    o = layers.Dense(16)(x)
    return keras.Model(i, o)


class BarlowModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = build_twin()
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, batch: tuple) -> dict:
        # get the two augmentations from the batch
        y_a, y_b = batch

        with tf.GradientTape() as tape:
            # get two versions of predictions
            z_a, z_b = self.encoder(y_a, training=True), self.encoder(y_b, training=True)
            loss = self.loss(z_a, z_b)

        grads_model = tape.gradient(loss, self.encoder.trainable_variables)
        self.optimizer.apply_gradients(zip(grads_model, self.encoder.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


bm = BarlowModel()
bm.compile(optimizer=keras.optimizers.Adam(1e-3), loss=BarlowLoss(BATCH_SIZE))
history = bm.fit(augment_versions, epochs=3)
print("Barlow loss:", history.history["loss"])

# Evaluation: a linear classifier on the frozen encoder
xy_ds = tf.data.Dataset.from_tensor_slices((train_features, train_labels)).shuffle(1000)
xy_ds = xy_ds.batch(BATCH_SIZE, drop_remainder=True).prefetch(AUTO)
test_ds = tf.data.Dataset.from_tensor_slices((test_features, test_labels)).batch(32).prefetch(AUTO)

encoder = keras.Model(bm.encoder.input, bm.encoder.get_layer("bottleneck").output)
encoder.trainable = False
model = keras.Sequential(
    [encoder, layers.Dense(5, activation="softmax", kernel_regularizer=keras.regularizers.l2(0.02))]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(xy_ds, epochs=2, validation_data=test_ds)
print("Test loss and accuracy:", model.evaluate(test_ds))
