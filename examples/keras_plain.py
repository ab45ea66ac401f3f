"""Handwritten digits in plain Keras, on one device. keras_tfdist.py is the same script on several devices.

python examples/keras_plain.py [EPOCHS]
"""

import sys

import keras
from sklearn.datasets import load_digits

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 20

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")

model = keras.Sequential(
    [
        keras.layers.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(0.003),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(x[:1500], y[:1500], batch_size=60, epochs=EPOCHS, verbose=0)

loss, accuracy = model.evaluate(x[1500:], y[1500:], batch_size=60, verbose=0)
print(f"loss {loss:.3f}  accuracy {accuracy:.3f}")
