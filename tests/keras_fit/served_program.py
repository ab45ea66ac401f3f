"""A user's program with callbacks that write files, saving and loading; run by `served_test.py`.

tfdist run --strategy=parameter_server served_program.py DIRECTORY
"""

import os
import pathlib
import sys

import keras
import numpy as np

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
keras.utils.set_random_seed(1)
folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(100, 6)), rng.integers(0, 4, 100)
hidden = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
model = keras.Sequential([keras.Input([6]), *hidden, keras.layers.Dense(4)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
before = model.evaluate(x, y, verbose=0)
callbacks = [
    keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="val_loss", save_best_only=True),
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=5, restore_best_weights=True),
]
options = {"batch_size": 9, "verbose": 0, "class_weight": {0: 0.5, 2: 3.0}}  # the last batch has 8 rows
history = model.fit(x, y, epochs=2, validation_split=0.2, callbacks=callbacks, **options).history
model.save(folder / "model.keras")
loaded = keras.models.load_model(folder / "model.keras")
numbers = {"before": before, "evaluated": loaded.evaluate(x, y, verbose=0), "predicted": model.predict(x, verbose=0)}
numbers |= {"history": [*history["loss"], *history["val_loss"]], "more": loaded.fit(x, y, **options).history["loss"]}
weights = [*loaded.weights, *loaded.optimizer.variables]
exact = {f"exact {i}": variable.numpy() for i, variable in enumerate(weights)}
np.savez(folder / f"{os.getpid()}.npz", **numbers, **exact)
