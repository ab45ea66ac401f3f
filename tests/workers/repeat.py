"""Trains repeatedly from the same initial weights, with random delays; returns a digest of each result."""

import hashlib
import pathlib
import random
import time

import keras
import numpy as np

import tfdist
from tfdist import models

STEPS = 5


def work(strategy: tfdist.Strategy, directory: pathlib.Path, repeats: str) -> list[str]:
    keras.utils.set_random_seed(1)
    random.seed(strategy.cluster.rank)
    numbers = np.random.default_rng(2)
    data = numbers.standard_normal((60, 8, 8, 1)).astype("float32"), numbers.integers(0, 10, 60)
    with strategy.scope():
        # Two kernels of 360 kB in their own messages, and a bucket of small tensors: three that may arrive in any order.
        trainer = tfdist.Trainer(
            models.build("mlp(hidden=(300, 300, 300))", (8, 8, 1), 10),
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    delay = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: time.sleep(random.uniform(0, 0.004))
    )
    trainer.build(data)
    variables = [*trainer.model.variables, *trainer.model.optimizer.variables]
    start = [np.asarray(variable) for variable in variables]
    digests = []
    for _ in range(int(repeats)):
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        trainer.train_state.step = 0
        trainer.fit(data, batch_size=20, steps=STEPS, schedule=tfdist.Schedule(steps_per_call=1), callbacks=[delay])
        digests.append(hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in variables)).hexdigest())
    return digests
