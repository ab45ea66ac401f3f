"""One process of a job in which rank 2 sleeps between two calls of the compiled loop."""

import time

import keras
import numpy as np

import tfdist

X = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(64, 1)).astype("float32")


class FallsAsleep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 20:
            time.sleep(1000)  # here


def main() -> None:
    strategy = tfdist.load_strategy(start_timeout_seconds=60)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse")
    callbacks = [FallsAsleep()] if strategy.cluster.rank == 2 else [keras.callbacks.Callback()]
    trainer.fit(
        (X, Y),
        batch_size=8,
        steps=100,
        schedule=tfdist.Schedule(steps_per_call=5),
        callbacks=callbacks,
        checks=tfdist.Checks(stall_warning_seconds=2.0, stall_shutdown_seconds=4.0),
    )


if __name__ == "__main__":
    main()
