"""One process of a job that makes several errors, one after another.

python tests/keras_fit/wrong_worker.py STRATEGY WAY,WAY,...
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.errors import TfdistError

X = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 24)


def network(width: int = 6) -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(width), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def late_order(rank: int) -> tf.data.Dataset:
    """12 batches, of which the first 8 are the same on every process."""
    first, rest = (tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])) for rows in (slice(16), slice(16, None)))
    return first.concatenate(rest.shuffle(8, seed=rank)).batch(2)


def main(name: str, ways: str) -> None:
    strategy = tfdist.load_strategy(name, start_timeout_seconds=60)
    for way in ways.split(","):
        try:
            go(strategy, way)
        except TfdistError as error:
            print(f"{way}: {type(error).__name__}: {error}", flush=True)


def go(strategy: tfdist.Strategy, way: str) -> None:
    rank = strategy.cluster.rank
    with strategy.scope():
        model = network(6 + rank if way == "other models" else 6)
    options = {"clip_norm": 1.0 + rank} if way == "other options" else {}
    seconds = 5.0 if way == "a skipped call" else 60.0
    tfdist.distribute(model, strategy, stall_shutdown_seconds=seconds, **options)
    if way == "other order":  # shuffled before a seed is set
        model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24).batch(6), verbose=0)
    elif way == "late order":
        model.fit(late_order(rank), verbose=0)
    elif way == "late order and a stop":
        stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batch == 10 and _stop(model))
        model.fit(late_order(rank), verbose=0, callbacks=[stop])
    elif way == "late order of an unknown number":
        model.evaluate(late_order(rank).filter(lambda x, y: True), verbose=0)
    elif way == "own share":
        model.fit(X[rank::2], Y[rank::2], batch_size=6, verbose=0)
    elif way == "other sizes":
        model.fit(X[: 18 + 6 * rank], Y[: 18 + 6 * rank], batch_size=6, verbose=0)
    elif way == "other epochs":
        model.fit(X, Y, batch_size=6, epochs=2 + rank, verbose=0)
    elif way == "a trainer's epochs":
        with strategy.scope():
            tfdist.Trainer(network(), optimizer="sgd", loss="mse").fit((X, X[:, :3]), epochs=2 + rank, verbose=0)
    elif way == "another batch":
        model.train_on_batch(X[rank : rank + 6], Y[rank : rank + 6])
    elif way == "another call":
        model.predict(X, verbose=0) if rank else model.evaluate(X, Y, verbose=0)
    elif way == "a stop on one":
        stop = [] if rank else [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: _stop(model))]
        print(f"{way}: epochs", len(model.fit(X, Y, batch_size=6, epochs=9, verbose=0, callbacks=stop).epoch))
    elif way == "a skipped call":
        model.evaluate(X, Y, verbose=0) if rank == 0 else None
    else:
        model.fit(X, Y, batch_size=6, verbose=0)
    if way == "a skipped call":
        strategy.group.barrier("never", deadline=30)


def _stop(model: keras.Model) -> None:
    model.stop_training = True


if __name__ == "__main__":
    main(*sys.argv[1:])
