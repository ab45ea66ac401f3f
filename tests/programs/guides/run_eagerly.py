"""Debugging a model with run_eagerly: a train_step and a layer that print what they see."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(812)


class MyAntirectifier(layers.Layer):
    def build(self, input_shape):
        output_dim = input_shape[-1]
        self.kernel = self.add_weight(
            shape=(output_dim * 2, output_dim), initializer="he_normal", name="kernel", trainable=True
        )

    def call(self, inputs):
        pos = ops.relu(inputs)
        neg = ops.relu(-inputs)
        concatenated = ops.concatenate([pos, neg], axis=-1)
        mixed = ops.matmul(concatenated, self.kernel)
        print("layer:", tuple(mixed.shape))
        return mixed


class MyModel(keras.Model):
    def train_step(self, data):
        inputs, targets = data
        trainable_vars = self.trainable_variables
        with tf.GradientTape() as tape2:
            with tf.GradientTape() as tape1:
                y_pred = self(inputs, training=True)  # Forward pass
                loss = self.compute_loss(y=targets, y_pred=y_pred)
            dl_dw = tape1.gradient(loss, trainable_vars)
        d2l_dw2 = tape2.gradient(dl_dw, trainable_vars)
        # Values can be read and printed, because each operation runs as it is called.
        print(f"\nmax of dl_dw[0]: {float(tf.reduce_max(dl_dw[0])):.4f}")
        print(f"\nmin of d2l_dw2[0]: {float(tf.reduce_min(d2l_dw2[0])):.4f}")
        grads = [0.2 * w1 + 0.8 * w2 for (w1, w2) in zip(d2l_dw2, dl_dw, strict=True)]
        self.optimizer.apply(grads, trainable_vars)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(targets, y_pred)
        return {m.name: m.result() for m in self.metrics}


def get_model():
    inputs = keras.Input(shape=(64,), name="digits")
    x = layers.Rescaling(1.0 / 255)(inputs)
    x = layers.Dense(8, activation="tanh")(x)
    x = MyAntirectifier()(x)
    x = layers.Dense(16, activation="tanh")(x)
    outputs = layers.Dense(10, activation="softmax")(x)
    return MyModel(inputs, outputs)


x_train = np.random.randint(0, 256, size=(110, 64)).astype("float32")
y_train = np.random.randint(0, 10, size=(110,))

model = get_model()
model.compile(
    optimizer=keras.optimizers.SGD(learning_rate=1e-2),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    run_eagerly=True,
)
model.fit(x_train, y_train, epochs=1, batch_size=32, validation_split=0.1)

# Only a few steps, to look closer
model.fit(x_train, y_train, epochs=1, batch_size=16, steps_per_epoch=2)
print("predictions:", np.round(model.predict(x_train[:2]), 4))
