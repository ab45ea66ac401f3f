"""What a batch 16 times as large costs in accuracy, with the linear rule and a warmup, without the warmup, and without both.

    python benchmarks/large_batch.py

Trains the CNN of `learning.py` with two replicas, everywhere for the same epochs, and prints a Markdown table: accuracy on
all test images (mean over the seeds), and the difference to the small batch with its standard error over the seeds.

Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017 (arXiv:1706.02677).
"""

import argparse
import logging
import math
import statistics
import sys
from typing import Any

import keras
from learning import data

import tfdist
from tfdist.optimizers import MomentumCorrectedSGD, make_learning_rate

TIMES = 16
ROWS = {  # batch over the base batch, rule, whether it warms up
    "base": (1, "none", False),
    "16 times, linear rule and warmup": (TIMES, "linear", True),
    "16 times, linear rule alone": (TIMES, "linear", False),
    "16 times, rate as it was": (TIMES, "none", False),
}


def train(strategy: tfdist.Strategy, whole: Any, row: str, seed: int, given: argparse.Namespace) -> float:
    """Trains once; returns the accuracy on the test images, in points of a hundred."""
    times, rule, warms_up = ROWS[row]
    batch_size = given.base_batch_size * times
    steps_in_epoch = whole.train.size // batch_size
    rate = make_learning_rate(
        given.rate,
        scaling=rule,
        base_batch_size=given.base_batch_size,
        batch_size=batch_size,
        warmup_steps=round(given.warmup_epochs * steps_in_epoch) if warms_up else 0,
        warmup_start=1 / TIMES,
        decay="cosine",
        total_steps=given.epochs * steps_in_epoch,
    )
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        trainer = tfdist.Trainer(
            tfdist.models.build("cnn(filters=(16, 32))", whole.input_shape, whole.classes),
            optimizer=MomentumCorrectedSGD(rate, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            seed=seed,
        )
    trainer.fit(
        whole.train,
        batch_size=batch_size,
        steps=given.epochs * steps_in_epoch,
        schedule=tfdist.Schedule(log_every=10**6),
        checks=tfdist.Checks(measure_every=0),
    )
    return 100 * trainer.evaluate(whole.test, batch_size=1000)["accuracy"]


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--base_batch_size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.005, help="the rate that suits the base batch")
    parser.add_argument("--warmup_epochs", type=float, default=2.0)
    given = parser.parse_args()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    strategy = tfdist.load_strategy("mirrored", devices=2)
    name, whole = data()
    print(
        f"{name}, {given.epochs} epochs, a base batch of {given.base_batch_size}, {given.warmup_epochs} epochs of warmup, "
        f"sgd(learning_rate={given.rate}, momentum=0.9), {given.seeds} seeds\n"
    )
    print("| batch | accuracy % | difference | standard error |\n| --- | --- | --- | --- |")
    base: list[float] = []
    for row in ROWS:
        found = [train(strategy, whole, row, seed, given) for seed in range(given.seeds)]
        base = base or found
        differences = [a - b for a, b in zip(found, base, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(given.seeds) if given.seeds > 1 else math.nan
        print(
            f"| {row} | {statistics.mean(found):.2f} | {statistics.mean(differences):+.2f} | {error:.2f} |", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
