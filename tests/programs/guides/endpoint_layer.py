"""Logistic regression whose last layer is an endpoint that adds its loss and updates its metric."""

import keras
import numpy as np
from keras import ops

keras.utils.set_random_seed(812)


class LogisticEndpoint(keras.layers.Layer):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy_metric = keras.metrics.BinaryAccuracy(name="binary_accuracy")

    def call(self, targets, logits, sample_weight=None):
        loss = self.loss_fn(targets, logits, sample_weight)
        self.add_loss(loss)
        self.accuracy_metric.update_state(targets, ops.sigmoid(logits), sample_weight)
        return ops.softmax(logits)


inputs = keras.Input(shape=(3,), name="inputs")
logits = keras.layers.Dense(10)(inputs)
targets = keras.Input(shape=(10,), name="targets")
predictions = LogisticEndpoint(name="predictions")(targets, logits)

model = keras.Model([inputs, targets], predictions)
model.compile(optimizer="adam")  # No loss argument!

data = {"inputs": np.random.random((100, 3)), "targets": np.random.random((100, 10))}
model.fit(data, epochs=3, batch_size=16)
print("Metrics of the model:", [m.name for m in model.metrics])

results = model.evaluate(data, batch_size=16, return_dict=True, verbose=0)
print("Predictions:", model.predict(data, verbose=0)[:2])
