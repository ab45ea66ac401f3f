"""Late ranks: step times if the others wait, and if late ranks drop micro-steps; one of two ranks is slow in some steps.

    python benchmarks/stragglers.py
    python benchmarks/stragglers.py --strategy=horovod --late=0.05 --slowdown=6

In a fraction of the steps, chosen at random, each micro-step of rank 1 takes `--slowdown` times as long as it takes alone. The
sides take turns; `drop(after=1.5 x)` has 1.5 times the median time that a rank computes in a step in which nobody is late.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
from workload import LEARNING_RATE, WORKLOADS, arrays

SLOW = 1
CALL = 5  # steps
RESULT = "RESULT "
LAUNCHERS = {"multiworker": "tensorflow", "horovod": "horovod"}
MEASURED = 110  # steps until a measured limit is chosen, at most


class Run(NamedTuple):
    """What a run measured after its first `MEASURED` steps.

    Attributes:
      step: mean milliseconds per step.
      usual: median of the calls' milliseconds per step.
      own: median milliseconds that the faster rank computes.
      dropped: fraction of the rows that were left out.
      rows: rows per second that were computed.
      limit: the measured limit in milliseconds, or None.
    """

    step: float
    usual: float
    own: float
    dropped: float
    rows: float
    limit: float | None


def rank_program(given: argparse.Namespace) -> None:
    """Trains on one rank; the chief prints the result."""
    import keras
    import tensorflow as tf

    import tfdist

    strategy = tfdist.load_strategy(given.strategy)

    class Late(keras.layers.Layer):
        """Sleeps on the slow rank if a pixel says so."""

        def call(self, images: tf.Tensor) -> tf.Tensor:
            def sleep(marks: np.ndarray) -> np.ndarray:
                if strategy.cluster.rank == SLOW and marks.max() > 0:
                    time.sleep(given.sleep)
                return np.zeros([], "float32")

            return images + tf.ensure_shape(tf.numpy_function(sleep, [images[:, 0, 0, 0]], tf.float32), [])

    workload, batch_size, steps = WORKLOADS["cnn"], 2 * given.rows, MEASURED + given.steps
    x, y = arrays("cnn", 20 * batch_size)
    x, y = (np.concatenate([part] * (-(-steps // 20)))[: steps * batch_size] for part in (x, y))
    is_late = np.random.default_rng(0).uniform(size=steps) < given.late
    x[:, 0, 0, 0] = np.repeat(is_late, batch_size)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inner = tfdist.models.build(workload.model, workload.shape, workload.classes)
        inputs = keras.Input(workload.shape)
        trainer = tfdist.Trainer(
            keras.Model(inputs, inner(Late()(inputs))),
            optimizer=keras.optimizers.SGD(LEARNING_RATE),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            accumulate_steps=given.micro_steps,
            straggler=given.straggler,
        )
    schedule, checks = tfdist.Schedule(log_every=CALL, steps_per_call=CALL), tfdist.Checks(measure_every=0)
    options: dict[str, Any] = {"schedule": schedule, "checks": checks, "shuffle": False, "verbose": 0}
    history = trainer.fit(x, y, batch_size=batch_size, steps=steps, **options)
    records = [r for r in history.records if r["kind"] == "train" and r["step"] > MEASURED]
    if strategy.is_chief:
        seconds = CALL * sum(r["step_seconds"] for r in records)
        dropped, all_rows = sum(r.get("dropped_rows", 0) for r in records), len(records) * CALL * batch_size
        limit = trainer.state["straggler/limit"].values[0] if "auto" in given.straggler else np.inf
        found = Run(
            step=1e3 * seconds / (len(records) * CALL),
            usual=1e3 * statistics.median(r["step_seconds"] for r in records),
            own=1e3 * statistics.median(r["step_seconds_min"] for r in records),
            dropped=dropped / all_rows,
            rows=(all_rows - dropped) / seconds,
            limit=1e3 * float(limit) if np.isfinite(limit) else None,
        )
        print(RESULT + json.dumps(found._asdict()), flush=True)
    strategy.group.leave()
    strategy.close()


def run(straggler: str, sleep: float, given: argparse.Namespace) -> Run:
    """Starts two ranks, and returns what the chief measured."""
    with tempfile.TemporaryDirectory() as logs:
        launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", f"--log_dir={logs}"]
        launch += [f"--launcher={LAUNCHERS[given.strategy]}", "--", sys.executable, __file__]
        names = ("strategy", "rows", "micro_steps", "late", "steps")
        options = [f"--straggler={straggler}", f"--sleep={sleep}", *(f"--{k}={getattr(given, k)}" for k in names)]
        command = [*launch, *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL)
    lines = [line.partition(RESULT)[2] for line in ended.stdout.splitlines() if RESULT in line]
    if not lines:
        raise SystemExit((ended.stdout + ended.stderr)[-2000:])
    return Run(**json.loads(lines[0]))


def table(sides: dict[str, list[Run]]) -> str:
    """Returns the medians of the runs of each side as a Markdown table; the first side is what others are compared with."""
    head = ["straggler", "limit", "rows dropped", "mean step", "median step", "rows per second", "gain"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    first = next(iter(sides.values()))
    for name, runs in sides.items():
        medians = {
            field: statistics.median(getattr(r, field) for r in runs) for field in ("step", "usual", "dropped", "rows")
        }
        gains = [ours.rows / theirs.rows for ours, theirs in zip(runs, first, strict=True)]
        limits = [r.limit for r in runs if r.limit is not None]
        limit = f"{statistics.median(limits):.0f} ms" if limits else "-"
        times = f"{medians['step']:.0f} ms | {medians['usual']:.0f} ms | {medians['rows']:.0f}"
        lines.append(
            f"| {name} | {limit} | {100 * medians['dropped']:.1f}% | {times} | {statistics.median(gains):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs all sides in turn, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=sorted(LAUNCHERS), default="multiworker")
    parser.add_argument("--rows", type=int, default=32, help="rows of one rank in a step")
    parser.add_argument("--micro_steps", type=int, default=8)
    parser.add_argument("--late", type=float, default=0.1, help="fraction of the steps in which rank 1 is late")
    parser.add_argument("--slowdown", type=float, default=4, help="how many times as long it then takes")
    parser.add_argument("--steps", type=int, default=150, help="that are counted")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--straggler", default="", help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--sleep", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.straggler:
        rank_program(given)
        return
    own = run("wait", 0.0, given).own
    sleep = 1e-3 * own / given.micro_steps * (given.slowdown - 1)
    print(
        f"a rank computes for {own:.0f} ms in a step; late, it sleeps for {1e3 * sleep:.0f} ms per micro-step",
        flush=True,
    )
    limit = f"drop(after={1.5e-3 * own:.4f})"
    sides: dict[str, list[Run]] = {"wait": [], limit: [], "drop(after=auto)": []}
    for _ in range(given.repeats):
        for name, runs in sides.items():
            runs.append(run(name, sleep, given))
            print(f"{name}: {runs[-1]}", flush=True)
    print(table(sides))


if __name__ == "__main__":
    main()
