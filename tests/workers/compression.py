"""Trains a few steps with each compression method in the arguments."""

import hashlib
import pathlib

import keras
import numpy as np

import tfdist
from tfdist import models

STEPS = 4


def train(strategy: tfdist.Strategy, method: str) -> dict:
    """Trains a small model; returns losses, digests of its weights and of replicated state, and the bytes that were sent."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    data = (random.standard_normal((64, 30)).astype("float32"), random.integers(0, 10, 64))
    with strategy.scope():
        trainer = tfdist.Trainer(
            models.build("mlp(hidden=(40,))", (30,), 10),
            optimizer=keras.optimizers.SGD(0.05),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            compression=method,
            compression_min_bytes=1024,
        )
    history = trainer.fit(data, batch_size=13, steps=STEPS, schedule=tfdist.Schedule(log_every=1))
    weights = hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in trainer.model.variables)).hexdigest()
    same = [array.values.tobytes() for array in trainer.state.values() if not array.per_replica]
    return {
        "weights": weights,
        "same": hashlib.sha256(b"".join(same)).hexdigest(),
        "losses": [record["loss"] for record in history.records],
        "payload_bytes": history.records[-1]["payload_bytes"],
    }


def work(strategy: tfdist.Strategy, directory: pathlib.Path, *methods: str) -> dict[str, dict]:
    return {method: train(strategy, method) for method in methods}
