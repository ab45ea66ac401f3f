"""A train_step that supports sample weights and class weights."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(812)


class CustomModel(keras.Model):
    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)  # Forward pass
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}


inputs = keras.Input(shape=(32,))
outputs = keras.layers.Dense(1)(inputs)
model = CustomModel(inputs, outputs)
model.compile(optimizer="adam", loss="mse", metrics=["mae"], weighted_metrics=["mse"])

x = np.random.random((220, 32))
y = np.random.random((220, 1))
sw = np.random.random((220, 1))
model.fit(x, y, sample_weight=sw, epochs=3)
print("Evaluated with them:", model.evaluate(x, y, sample_weight=sw, return_dict=True))

model.fit(x, y, epochs=1)

labels = (np.random.random(220) < 0.2).astype("int32")
inputs = keras.Input(shape=(32,))
hidden = keras.layers.Dense(8, activation="relu")(inputs)
outputs = keras.layers.Dense(2, activation="softmax")(hidden)
classifier = CustomModel(inputs, outputs)
classifier.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss="sparse_categorical_crossentropy",
    metrics=["sparse_categorical_accuracy"],
)
classifier.fit(x, labels, class_weight={0: 1.0, 1: 4.0}, epochs=3, batch_size=24)
