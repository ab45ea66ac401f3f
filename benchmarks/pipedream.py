"""What pipelines without a flush cost in accuracy and save in time: PipeDream and 2BW compared with 1F1B, on Fashion-MNIST.

    python benchmarks/pipedream.py --stages=2 --epochs=5 --seeds=3

Trains the same model with each schedule and seed, evaluates it after each epoch, and prints a table: accuracy on all test
images, mean and standard deviation over the seeds, after the first and the last epoch; examples per second, the median of the
seeds; and the histogram of the staleness: the share of all updates of stages by the age of the weights of their gradients, in
updates. The curves are drawn in `--plot`.

Trainings are appended to a file of JSON lines, and those that it already has are not repeated: the same command continues
after an interruption.
"""

import argparse
import json
import pathlib
import statistics
import sys
from collections import Counter
from typing import Any

from pipelined import RESULT, results_of

BATCH = 128
RUNS = "1f1b:1; 1f1b:4; pipedream:1; pipedream(vertical_sync=True):1; 2bw:4"


def rank_program(given: argparse.Namespace) -> None:
    """Trains in one of the processes; the first one prints the result."""
    import keras

    import tfdist

    schedule, _, micro_batches = given.run.rpartition(":")
    strategy = tfdist.load_strategy(
        "pipeline", intra_op_threads=1, pipeline_schedule=schedule, micro_batches=int(micro_batches)
    )
    whole = tfdist.data.load("fashion_mnist")
    keras.utils.set_random_seed(given.seed)
    with strategy.scope():
        trainer = tfdist.Trainer(
            tfdist.models.build(given.model, whole.input_shape, whole.classes),
            optimizer=keras.optimizers.SGD(given.learning_rate, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            seed=given.seed,
        )
    history = trainer.fit(
        whole,
        batch_size=BATCH,
        epochs=given.epochs,
        schedule=tfdist.Schedule(log_every=100, steps_per_call=50),
        checks=tfdist.Checks(measure_every=0),
        verbose=0,
    )
    train = [record for record in history.records if record["kind"] == "train"][1:]
    found = {
        "accuracy": [record["accuracy"] for record in history.records if record["kind"] == "eval"],
        "loss": [record["loss"] for record in train],
        "examples_per_second": statistics.median(record["examples_per_second"] for record in train),
        "staleness": staleness(strategy.schedule.delays or (0,) * given.stages, train[-1]["step"]),
    }
    if strategy.is_chief:
        print(RESULT + json.dumps(found), flush=True)
    strategy.group.barrier("end")
    strategy.group.leave()
    strategy.close()


def staleness(delays: tuple[int, ...], steps: int) -> dict[str, float]:
    """Returns the share of the updates of all stages by the age of the weights of their gradients."""
    counts = Counter(min(delay, step) for delay in delays for step in range(steps))
    return {str(age): count / counts.total() for age, count in sorted(counts.items())}


def train_all(given: argparse.Namespace, file: pathlib.Path) -> list[dict[str, Any]]:
    """Makes the trainings that the file does not have, and returns all."""
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    setting = {name: getattr(given, name) for name in ("stages", "epochs", "model", "learning_rate")}
    for seed in range(given.seeds):
        for run in map(str.strip, given.runs.split(";")):
            key = {**setting, "run": run, "seed": seed}
            if any(key.items() <= one.items() for one in found):
                continue
            flags = [f"--{name}={value}" for name, value in key.items()]
            command = [sys.executable, __file__, "--rank", *flags]
            found.append({**key, **results_of(command, given.stages, given.launcher, given.minutes)[0]})
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                lines.write(json.dumps(found[-1]) + "\n")
    return [one for one in found if setting.items() <= one.items() and one["seed"] < given.seeds]


def print_table(given: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """Prints a line for each schedule."""
    print(
        f"{given.model}, {given.stages} stages, {given.epochs} epochs in steps of {BATCH} examples, {given.seeds} seeds\n"
    )
    print("| schedule | micro-batches | accuracy %, first epoch | last epoch | examples/s | staleness |")
    print("| --- | --- | --- | --- | --- | --- |")
    for run in map(str.strip, given.runs.split(";")):
        some = [one for one in found if one["run"] == run]
        schedule, _, micro_batches = run.rpartition(":")
        first, last = (_mean([100 * one["accuracy"][place] for one in some]) for place in (0, -1))
        speed = statistics.median(one["examples_per_second"] for one in some)
        ages = ", ".join(f"{age}: {100 * share:.0f}%" for age, share in some[0]["staleness"].items())
        print(f"| `{schedule}` | {micro_batches} | {first} | {last} | {speed:.0f} | {ages} |")


def _mean(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def plot(found: list[dict[str, Any]], file: pathlib.Path) -> None:
    """Draws the accuracy after each epoch: the mean over the seeds, and each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for number, run in enumerate(dict.fromkeys(one["run"] for one in found)):
        curves = [one["accuracy"] for one in found if one["run"] == run]
        epochs = range(1, len(curves[0]) + 1)
        for curve in curves:
            axes.plot(epochs, curve, color=f"C{number}", alpha=0.25)
        axes.plot(epochs, [statistics.mean(each) for each in zip(*curves, strict=True)], color=f"C{number}", label=run)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="epoch", ylabel="accuracy on the test images")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main() -> None:
    """Trains; prints the table and draws the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=RUNS, help="schedules with their numbers of micro-batches, with ; between")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="mlp(hidden=(256, 256, 128))")
    parser.add_argument("--learning_rate", type=float, default=0.02)
    parser.add_argument("--launcher", choices=("tensorflow", "horovod"), default="tensorflow")
    parser.add_argument("--minutes", type=float, default=30.0, help="longest time of a training")
    parser.add_argument("--file", default="build/pipedream.jsonl")
    parser.add_argument("--plot", default="build/pipedream.png")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_program(given)
        return
    found = train_all(given, pathlib.Path(given.file))
    print_table(given, found)
    plot(found, pathlib.Path(given.plot))


if __name__ == "__main__":
    main()
