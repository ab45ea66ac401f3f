"""The side `fit`: Keras's own `fit` of a workload, plain or under this library with any flags of `tfdist run`.

    python benchmarks/fitted.py --plain
    python benchmarks/fitted.py --strategy=horovod ...

A call is an epoch, as Keras's callbacks see it.
"""

import argparse
import contextlib
import sys
import time

import keras
import stopwatch
from workload import LEARNING_RATE, WORKLOADS, arrays

from tfdist import keras_fit, models
from tfdist.cli import command, flags, open_strategy
from tfdist.config.job_config import RunConfig


class EachBatch(keras.callbacks.Callback):
    """Reads the logs of each batch, so that a call is a step, and its metrics are merged."""

    loss = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """See base class."""
        self.loss += (logs or {})["loss"]


class Epochs(keras.callbacks.Callback):
    """Notes when each epoch ended."""

    def __init__(self) -> None:
        """Notes nothing yet."""
        super().__init__()
        self.at: list[float] = []
        self.loss = float("nan")

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """See base class."""
        self.at.append(time.perf_counter())
        self.loss = float((logs or {})["loss"])


def fit(given: argparse.Namespace) -> tuple[list[float], float]:
    """Fits a workload's model as a script does; returns the seconds a step of each epoch that counts, and the last loss."""
    chosen, watch = WORKLOADS[given.workload], stopwatch.from_arguments(given)
    batch_size = chosen.rows * given.replicas
    x, y = arrays(given.workload, batch_size * watch.wait)
    keras.utils.set_random_seed(0)
    model = models.build(chosen.model, chosen.shape, chosen.classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(LEARNING_RATE), loss)
    epochs, count = Epochs(), watch.warm_calls + 1 + watch.calls
    callbacks = [epochs, EachBatch()] if given.each_batch else [epochs]
    model.fit(x, y, batch_size=batch_size, epochs=count, verbose=0, callbacks=callbacks)
    seconds = [(b - a) / watch.wait for a, b in zip(epochs.at, epochs.at[1:], strict=False)]
    return seconds[watch.warm_calls :], epochs.loss


def under_tfdist(config: RunConfig, given: argparse.Namespace) -> None:
    """As `tfdist run` runs a script."""
    with (
        open_strategy.running_strategy(config, end_timeout_seconds=config.stall_shutdown_seconds) as (
            config,
            _,
            strategy,
        ),
        contextlib.ExitStack() as on,
    ):
        on.enter_context(strategy.in_use())
        on.enter_context(
            keras_fit.attach_all(lambda model: keras_fit.DistributedModel(model, strategy, config), strategy)
        )
        seconds, loss = fit(given)
        chief = strategy.is_chief
    if chief:
        stopwatch.report(seconds, loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="Keras alone")
    parser.add_argument("--each_batch", action="store_true", help="with a callback that reads the logs of each batch")
    parser.add_argument("--replicas", type=int, default=1, help="of the whole job, for the global batch")
    stopwatch.add_arguments(parser)
    known, rest = parser.parse_known_args()
    if known.plain:
        stopwatch.report(*fit(known))
        sys.exit()
    sys.exit(
        command.run(
            "run",
            lambda values: flags.define(values, RunConfig),
            lambda values: under_tfdist(flags.config(values, RunConfig), known),
            ["fitted", *rest],
        )
    )
