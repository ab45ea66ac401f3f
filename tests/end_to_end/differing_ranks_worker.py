"""One process of a job in which rank 1 differs from rank 0 in one respect after another; prints what is raised.

python tests/end_to_end/differing_ranks_worker.py STRATEGY
"""

import contextlib
import importlib.metadata
import pathlib
import sys
import tempfile
from unittest import mock

import keras
import numpy as np

import tfdist
from tfdist import keras_internals
from tfdist.errors import TfdistError

X = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(64, 1)).astype("float32")


class Flip(keras.callbacks.Callback):
    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 20:  # right before a check, because an update may round it away
            [weights] = self.strategy.local(keras_internals.value_of(self.model.trainable_variables[1]))
            values = weights.numpy().copy()
            values.view(np.uint8)[-4] ^= 1
            weights.assign(values)


def train(strategy, units=4, activation="relu", more=(), momentum=0.9, callbacks=()):
    keras.utils.set_random_seed(0)  # with other initial weights, the loss may become inf at this learning rate
    with strategy.scope():
        hidden = keras.layers.Dense(units, activation=activation)
        model = keras.Sequential([keras.Input((5,)), hidden, *more, keras.layers.Dense(1)])
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.1, momentum), loss="mse")
    callbacks = [*callbacks, keras.callbacks.Callback()]
    trainer.fit(
        (X, Y),
        batch_size=8,
        steps=40,
        schedule=tfdist.Schedule(steps_per_call=5),
        callbacks=callbacks,
        checks=tfdist.Checks(check_sync_every=20),
    )


@contextlib.contextmanager
def another_version():
    installed = importlib.metadata.version
    with mock.patch("importlib.metadata.version", lambda name: "9.9" if name == "keras" else installed(name)):
        yield


@contextlib.contextmanager
def own_module(rank):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
        pathlib.Path(folder, "own_of_test.py").write_text(f"RANK = {rank}\n")
        __import__("own_of_test")
        yield
    del sys.modules["own_of_test"]


def say(case, call):
    try:
        call()
        print(f"{case}: trained", flush=True)
    except TfdistError as error:
        print(f"{case}: {type(error).__name__}: {error}", flush=True)


def main(name: str) -> None:
    strategy = tfdist.load_strategy(name, start_timeout_seconds=60)
    other = strategy.cluster.rank == 1
    cases = {
        "nothing": {},
        "shape": {"units": 5 if other else 4},
        "setting": {"activation": "tanh" if other else "relu"},
        "more": {"more": [keras.layers.Dense(4)] if other else []},
        "momentum": {"momentum": 0.5 if other else 0.9},
        "bit": {"callbacks": [Flip(strategy)] if other else []},
    }
    for case, options in cases.items():
        say(case, lambda options=options: train(strategy, **options))
    with another_version() if other else contextlib.nullcontext():
        say("version", lambda: train(strategy))
    with own_module(strategy.cluster.rank):
        say("code", lambda: train(strategy))
    strategy.group.barrier("end")
    strategy.group.leave()
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
