"""What compression costs in accuracy: each method compared with `none`, with the same seeds, after the same number of steps.

    python benchmarks/learning.py --methods="bf16; topk(ratio=0.01); powersgd(rank=4)" --seeds=3 --steps=4000

Trains a small model on Fashion-MNIST where it is on this machine, else on mnist5k, with two replicas, and prints a line of
a Markdown table for each method: accuracy on all test images (mean over the seeds), the difference to `none` with its
standard error over the pairs, the compression ratio, and the time of a step over that of `none`. The sum that a step
makes is the same on any engine, so what is learned is too.
"""

import argparse
import json
import logging
import math
import pathlib
import statistics
import sys
import time
from typing import Any, NamedTuple

import keras

import tfdist
from tfdist.errors import InputError

BATCH = 128


class Outcome(NamedTuple):
    """One training: accuracy on the test images, bytes saved, seconds a step."""

    accuracy: float
    ratio: float
    seconds: float


def data() -> tuple[str, tfdist.data.DatasetSplits]:
    """Fashion-MNIST, or the part of MNIST that needs no files."""
    try:
        return "fashion_mnist", tfdist.data.load("fashion_mnist")
    except InputError:
        return "mnist5k", tfdist.data.load("mnist5k")


def train(strategy: tfdist.Strategy, whole: Any, method: str, seed: int, given: argparse.Namespace) -> Outcome:
    """Trains once; the first half of the steps is left out of the time."""
    steps = given.steps
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        trainer = tfdist.Trainer(
            tfdist.models.build(given.model, whole.input_shape, whole.classes),
            optimizer=sgd(method, steps),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            compression=method,
            compression_min_bytes=given.compression_min_bytes,
            seed=seed,
        )
    history = trainer.fit(
        whole.train,
        batch_size=BATCH,
        steps=steps // 2,
        schedule=tfdist.Schedule(log_every=steps),
        checks=tfdist.Checks(measure_every=0),
    )
    began = time.perf_counter()
    history = trainer.fit(
        whole.train,
        batch_size=BATCH,
        steps=steps - steps // 2,
        schedule=tfdist.Schedule(log_every=steps),
        checks=tfdist.Checks(measure_every=0),
    )
    seconds = (time.perf_counter() - began) / (steps - steps // 2)
    accuracy = trainer.evaluate(whole.test, batch_size=1000)["accuracy"]
    return Outcome(accuracy, history.last("train")["compression_ratio"], seconds)


def sgd(method: str, steps: int) -> keras.Optimizer:
    """The same for all, but for methods that bring their own momentum or send signs alone; the rate falls to 0.

    Where `dgc` sends an element its momentum ends, so it moves less at the same rate.
    """
    rate, momentum = 0.02, 0.9
    if method.startswith("dgc"):
        rate, momentum = 0.06, 0.0
    if method.startswith("signsgd"):
        rate = 0.0001
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(rate, steps), momentum=momentum)


def row(method: str, outcomes: list[Outcome], plain: list[Outcome]) -> str:
    """One line of the table; accuracies in points of a hundred."""
    differences = [100 * (a.accuracy - b.accuracy) for a, b in zip(outcomes, plain, strict=True)]
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else float("nan")
    accuracy = 100 * statistics.mean(o.accuracy for o in outcomes)
    ratio, time_ratio = outcomes[0].ratio, statistics.median(o.seconds for o in outcomes)
    time_ratio /= statistics.median(o.seconds for o in plain)
    holds = "yes" if mean >= -(0.5 + 2 * (0.0 if math.isnan(error) else error)) else "no"
    return f"| `{method}` | {accuracy:.2f} | {mean:+.2f} | {error:.2f} | {ratio:.3g} | {time_ratio:.2f} | {holds} |"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", required=True, help="with ; between")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--model", default="mlp(hidden=(256, 128))")
    parser.add_argument("--compression_min_bytes", type=int, default=64 * 1024)
    parser.add_argument("--raw", default="", help="a file that gets each training's outcome as a line of JSON")
    given = parser.parse_args()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    strategy = tfdist.load_strategy("mirrored", devices=2)
    name, whole = data()
    print(f"{name}, {given.model}, {given.steps} steps of {BATCH} examples, {given.seeds} seeds\n")
    print("| method | accuracy % | difference | standard error | ratio | time of a step | within 0.5 + 2 errors |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    plain: list[Outcome] = []
    for method in ["none", *(m.strip() for m in given.methods.split(";") if m.strip())]:
        outcomes = [train(strategy, whole, method, seed, given) for seed in range(given.seeds)]
        plain = plain or outcomes
        if given.raw:
            with pathlib.Path(given.raw).open("a") as file:
                file.writelines(json.dumps({"method": method, **o._asdict()}) + "\n" for o in outcomes)
        print(row(method, outcomes, plain), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
