"""A regression model with a custom train_step, which fit calls."""

import os

# This guide can only be run with the TF backend.
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(812)


class CustomModel(keras.Model):
    def train_step(self, data):
        # Unpack the data. Its structure depends on the model and on what is passed to `fit()`.
        x, y = data

        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)  # Forward pass
            # The loss function is configured in `compile()`.
            loss = self.compute_loss(y=y, y_pred=y_pred)

        # Compute gradients
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)

        # Update weights
        self.optimizer.apply(gradients, trainable_vars)

        # Update metrics (includes the metric that tracks the loss)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)

        # Return a dict mapping metric names to current value
        return {m.name: m.result() for m in self.metrics}


inputs = keras.Input(shape=(32,))
x = layers.Dense(16, activation="relu")(inputs)
x = layers.Dropout(0.2)(x)
outputs = layers.Dense(1)(x)
model = CustomModel(inputs, outputs)
model.summary()
model.compile(optimizer="adam", loss="mse", metrics=["mae"])

x = np.random.random((200, 32))
y = np.random.random((200, 1))
history = model.fit(x, y, epochs=3)
print("Loss by epoch:", history.history["loss"])
print("MAE by epoch:", history.history["mae"])

# The plain loop of `evaluate()` and `predict()` is as before.
print("Evaluation:", model.evaluate(x, y, return_dict=True))
print("Predictions:", model.predict(x[:4]).ravel())
