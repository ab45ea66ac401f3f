"""Handwritten digits with tfdist: keras_plain.py on the devices of a strategy.

    python examples/keras_tfdist.py [EPOCHS]

The same file trains on two processes, with another strategy (`auto` chooses by the environment):

    tfdist launch --processes=2 -- python examples/keras_tfdist.py 20 auto
"""

import sys

import keras
from sklearn.datasets import load_digits

import tfdist

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
STRATEGY = {"name": sys.argv[2]} if len(sys.argv) > 2 else {"name": "mirrored", "devices": 2}

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")

strategy = tfdist.load_strategy(**STRATEGY)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    trainer = tfdist.Trainer(
        model,
        optimizer=keras.optimizers.Adam(0.003),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
trainer.fit(x[:1500], y[:1500], batch_size=60, epochs=EPOCHS, verbose=0)

result = trainer.evaluate(x[1500:], y[1500:], batch_size=60)
if strategy.is_chief:
    print(f"loss {result['loss']:.3f}  accuracy {result['accuracy']:.3f}")
strategy.group.leave()
strategy.close()
