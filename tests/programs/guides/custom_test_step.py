"""A model with a custom test_step, which evaluate calls."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np

keras.utils.set_random_seed(812)


class CustomModel(keras.Model):
    def test_step(self, data):
        # Unpack the data
        x, y = data
        # Compute predictions
        y_pred = self(x, training=False)
        # Updates the metrics tracking the loss
        loss = self.compute_loss(y=y, y_pred=y_pred)
        # Update the metrics.
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        # Return a dict mapping metric names to current value.
        # Note that it will include the loss (tracked in self.metrics).
        return {m.name: m.result() for m in self.metrics}


# Construct an instance of CustomModel
inputs = keras.Input(shape=(32,))
outputs = keras.layers.Dense(1)(inputs)
model = CustomModel(inputs, outputs)
model.compile(loss="mse", metrics=["mae"])

# Evaluate with our custom test_step
x = np.random.random((250, 32))
y = np.random.random((250, 1))
results = model.evaluate(x, y)
print("Untrained [loss, mae]:", results)

# The same step is used for the validation data of `fit()`.
model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
history = model.fit(x, y, epochs=2, batch_size=32, validation_split=0.2)
print("Validation loss:", history.history["val_loss"])
print("Trained:", model.evaluate(x, y, return_dict=True))
