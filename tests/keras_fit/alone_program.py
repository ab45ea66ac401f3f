"""A user's program in which the chief does many things alone, and all processes do some; run by `alone_test.py`.

tfdist run --strategy=multiworker alone_program.py RANK
"""

import pathlib
import sys

import keras
import numpy as np

rank = int(sys.argv[1])
x = np.random.default_rng(0).normal(size=(22, 5))
y = np.random.default_rng(1).integers(0, 3, 22)


def network():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def report(what, model, history):
    print(what, [float(f"{value:.6g}") for value in history.history["loss"]], flush=True)
    print(f"{what} metrics", results(model), flush=True)
    print(f"{what} weights", float(f"{sum(np.sum(np.abs(w)) for w in model.get_weights()):.6g}"), flush=True)


def results(model):
    return [float(f"{value:.6g}") for value in model.metrics[1].result().values()]


class Saves(keras.callbacks.Callback):
    """Reads metrics, saves and loads on one process only."""

    def on_epoch_end(self, epoch, logs=None):
        if rank == 0:
            print("metrics", results(self.model), flush=True)
            self.model.save(f"epoch-{epoch}.keras")
            other = keras.models.load_model(f"epoch-{epoch}.keras")
            other.optimizer.build(other.trainable_variables)


model = network()
callbacks = [keras.callbacks.ModelCheckpoint("last.keras"), Saves()]
report("checkpoints", model, model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks))

model.save("all.keras")  # on every process, to one path
loaded = keras.models.load_model("all.keras")
report("loaded", loaded, loaded.fit(x, y, batch_size=8, epochs=1, verbose=0))

model.save_weights("some.weights.h5")
model.fit(x, y, batch_size=8, epochs=1, verbose=0)
if rank == 0:
    model.load_weights("some.weights.h5")  # on the chief only: the others get its weights
report("chief's", model, model.fit(x, y, batch_size=8, epochs=1, verbose=0))

if rank == 0:
    scratch = network()  # built on one process only
    print("alone", float(np.sum(scratch(x[:2]))) is not None)


class Interrupted(Exception):
    pass


class Stops(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Interrupted


backup = keras.callbacks.BackupAndRestore("backup")
first = network()
try:
    first.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[backup, Stops()])
except Interrupted:
    pass
second = network()  # as after a restart, with different weights
history = second.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[keras.callbacks.BackupAndRestore("backup")])
report("restored", second, history)
print("epochs", history.epoch, flush=True)

if pathlib.Path("misuse").exists() and rank == 0:
    model.evaluate(x, y, verbose=0)  # on one process only, which is an error
