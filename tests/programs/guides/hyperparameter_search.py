"""Hyperparameter search: a hypermodel, trials over a grid, and the best one trained again."""

import itertools
import os

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(812)


class HyperParameters:
    """The values of one trial, and the space they are taken from."""

    def __init__(self, values=None):
        self.values = dict(values or {})
        self.space = {}

    def _register(self, name, values):
        self.space.setdefault(name, list(values))
        return self.values.setdefault(name, self.space[name][0])

    def Choice(self, name, values):  # noqa: N802
        return self._register(name, values)

    def Int(self, name, min_value, max_value, step=1):  # noqa: N802
        return self._register(name, range(min_value, max_value + 1, step))

    def Boolean(self, name):  # noqa: N802
        return self._register(name, [False, True])


class MyHyperModel:
    def build(self, hp):
        model = keras.Sequential()
        model.add(layers.Flatten())
        model.add(layers.Dense(units=hp.Int("units", min_value=8, max_value=16, step=8), activation="relu"))
        if hp.Boolean("dropout"):
            model.add(layers.Dropout(rate=0.25))
        model.add(layers.Dense(10, activation="softmax"))
        model.compile(
            optimizer=keras.optimizers.Adam(learning_rate=hp.Choice("lr", [1e-2])),
            loss="categorical_crossentropy",
            metrics=["accuracy"],
            # The quick variant runs several batches in one call.
            steps_per_execution=2 if hp.values["units"] == 8 else 1,
        )
        return model

    def fit(self, hp, model, *args, **kwargs):
        return model.fit(*args, batch_size=32, **kwargs)


class GridSearch:
    def __init__(self, hypermodel, objective, directory):
        self.hypermodel = hypermodel
        self.objective = objective
        self.directory = directory
        os.makedirs(directory, exist_ok=True)
        hp = HyperParameters()
        hypermodel.build(hp)
        self.space = hp.space
        self.trials = []

    def search(self, *args, callbacks=(), **kwargs):
        for number, values in enumerate(itertools.product(*self.space.values())):
            hp = HyperParameters(dict(zip(self.space, values, strict=True)))
            keras.backend.clear_session()
            model = self.hypermodel.build(hp)
            checkpoint = keras.callbacks.ModelCheckpoint(
                os.path.join(self.directory, f"trial_{number}.weights.h5"),
                monitor=self.objective,
                mode="max",
                save_best_only=True,
                save_weights_only=True,
            )
            history = self.hypermodel.fit(hp, model, *args, callbacks=[*callbacks, checkpoint], **kwargs)
            score = max(history.history[self.objective])
            self.trials.append((score, number, hp))
            print(f"Trial {number}: {hp.values} {self.objective}={score:.4f}")

    def get_best_hyperparameters(self, num_trials=1):
        return [hp for _, _, hp in sorted(self.trials, key=lambda trial: (-trial[0], trial[1]))[:num_trials]]


rng = np.random.default_rng(0)
prototypes = rng.normal(size=(10, 8, 8))
labels = rng.integers(10, size=220)
images = (prototypes[labels] + rng.normal(scale=0.7, size=(220, 8, 8))).astype("float32")
x_train, x_val = images[:160], images[160:]
y_train, y_val = (keras.utils.to_categorical(part, 10) for part in (labels[:160], labels[160:]))

tuner = GridSearch(MyHyperModel(), objective="val_accuracy", directory="my_dir")
print("Search space:", tuner.space)
stop_early = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)
tuner.search(x_train, y_train, epochs=2, validation_data=(x_val, y_val), callbacks=[stop_early], verbose=0)

# Retrain the best model on the entire dataset.
best_hp = tuner.get_best_hyperparameters(5)[0]
model = MyHyperModel().build(best_hp)
x_all, y_all = np.concatenate((x_train, x_val)), np.concatenate((y_train, y_val))
history = model.fit(x=x_all, y=y_all, epochs=2, batch_size=32)
model.summary()
print("best:", best_hp.values, history.history)
