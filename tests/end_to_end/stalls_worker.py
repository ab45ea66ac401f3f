"""One process of a job in which one rank sleeps between two calls of the compiled loop, or before the first.

python tests/end_to_end/stalls_worker.py SLEEPER WARNING_SECONDS SHUTDOWN_SECONDS [STEP]
"""

import sys
import time

import keras
import numpy as np

import tfdist

X = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(64, 1)).astype("float32")


class FallsAsleep(keras.callbacks.Callback):
    def __init__(self, when):
        super().__init__()
        self._when = when

    def on_train_begin(self, logs=None):
        if self._when == 0:
            time.sleep(1000)

    def on_train_batch_end(self, batch, logs=None):
        if self._when is not None and self.model.optimizer.iterations == self._when:
            time.sleep(1000)  # here


def main(sleeper: int, warning: float, shutdown: float, step: int = 20) -> None:
    strategy = tfdist.load_strategy(start_timeout_seconds=60)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse")
    callbacks = [FallsAsleep(step if strategy.cluster.rank == sleeper else None)]
    limits = {"stall_warning_seconds": warning, "stall_shutdown_seconds": shutdown}
    trainer.fit(
        (X, Y),
        batch_size=8,
        steps=100,
        schedule=tfdist.Schedule(steps_per_call=5),
        callbacks=callbacks,
        checks=tfdist.Checks(**limits),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
