"""What `--sync` costs in accuracy and saves in time: its methods compared with `every_step`, after the same number of examples.

    python benchmarks/sync_learning.py --hours=3

Trains each task of `sync_tasks.py` with every method and seed, on `--replicas` logical devices of one process: what is learned
is the same as over a network, because the sums are. Replicas share the cores, so times are not measured there, but computed:

    time after k steps = k * (time of a step) + (bytes sent in k steps) / (rate of the link)

or the larger of the two terms if exchanges overlap steps. The time of a step is measured by one process with the rows of one
replica on one core; the bytes are those that a rank sends for its recorded payload: 2 (N - 1) / N times as many for an
all-reduce around a ring, N - 1 times as many if all ranks gather codes. Horovod sends fewer codes over more than two ranks.

Trainings are appended to a file of JSON lines, and those that it already has are not repeated: the same command continues
after `--hours`, or after an interruption. `sync_report.py` makes tables and pictures of the file.
"""

import argparse
import json
import logging
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import keras
import machine
import starting
from sync_tasks import TASKS, Method, Task

import tfdist
from tfdist.config.sync import parse_sync
from tfdist.errors import InputError, NotFiniteError

EVALUATIONS = 12
STEP = "step"


def trainer(task: Task, whole: Any, strategy: Any, method: Method, seed: int, steps: int) -> tfdist.Trainer:
    """A new model and its trainer, for a number of steps."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    options = {} if method.sync == "every_step" else {"sync": method.sync}
    with strategy.scope():
        return tfdist.Trainer(
            tfdist.models.build(task.model, whole.input_shape, whole.classes),
            optimizer=task.optimizer(steps),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            compression=method.compression,
            compression_min_bytes=1024,  # these models are small
            seed=seed,
            **options,
        )


def learn(task: Task, strategy: Any, method: Method, seed: int, steps: int) -> dict[str, Any]:
    """Trains once; returns evaluations and the payload per step, both by step."""
    name, whole = task.load()
    sync = parse_sync(method.sync)
    batch_size = task.batch_size // strategy.replicas if sync.trains_clients else task.batch_size  # of a client
    steps = max(
        1, steps * task.batch_size // sync.examples_per_step(whole.train.size, task.batch_size)
    )  # equal examples
    made = trainer(task, whole, strategy, method, seed, steps)
    every = max(steps // EVALUATIONS, 1)
    try:
        history = made.fit(
            whole.train,
            batch_size=batch_size,
            steps=steps,
            validation_data=whole.test,
            validation_batch_size=4 * task.batch_size,
            verbose=0,
            schedule=tfdist.Schedule(log_every=every, eval_every=every),
            checks=tfdist.Checks(measure_every=0),
        )
    except NotFiniteError as error:
        return {"data": name, "failure": str(error)}
    keep = {"eval": (task.metric,), "train": ("payload_bytes", "replica_divergence")}
    found: dict[str, Any] = {"data": name, "parameters": made.model.count_params()}
    for kind, fields in keep.items():
        records = [record for record in history.records if record["kind"] == kind]
        found |= {f: [[r["step"], float(r[f])] for r in records if f in r] for f in fields}
    return found


def time_of_step(name: str, replicas: int) -> float:
    """Measures a step with the rows of one replica on one core; returns milliseconds. To be called in its own process."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    task = TASKS[name]
    _, whole = task.load()
    made = trainer(task, whole, tfdist.load_strategy("single"), Method("every_step"), 0, 100)
    took = []
    for _ in range(4):
        began = time.perf_counter()
        made.fit(
            whole.train,
            batch_size=task.batch_size // replicas,
            steps=30,
            verbose=0,
            schedule=tfdist.Schedule(log_every=30),
            checks=tfdist.Checks(measure_every=0),
        )
        took.append((time.perf_counter() - began) / 30 * 1e3)
    return min(took)


class File:
    """The file of results."""

    def __init__(self, path: pathlib.Path):
        """Reads which trainings there are."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._done = {_key(json.loads(line)) for line in lines}

    def has(self, entry: dict[str, Any]) -> bool:
        """Whether a training was made."""
        return _key(entry) in self._done

    def write(self, entry: dict[str, Any]) -> None:
        """Appends a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._done.add(_key(entry))


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in ("task", "method", "seed", "replicas", "steps"))


def wanted(given: argparse.Namespace) -> list[tuple[str, Method | None, dict[str, Any]]]:
    """All trainings in the order in which they are made, and the times of steps: every method of a task with each seed."""
    found: list[tuple[str, Method | None, dict[str, Any]]] = []
    for name in given.tasks:
        task = TASKS[name]
        entry = {"task": name, "replicas": given.replicas, "steps": round(task.steps * given.scale)}
        found.append((name, None, {**entry, "method": STEP, "seed": 0}))
        for seed in range(given.seeds):
            found += [
                (name, method, {**entry, "method": str(method), "seed": seed})
                for method in task.methods
                if method == task.methods[0] or re.search(given.methods, str(method))
            ]
    return found


def found_by(name: str, method: Method | None, entry: dict[str, Any], strategy: Any) -> dict[str, Any]:
    """Makes a training, or measures the time of a step; returns the fields of its line."""
    task, began = TASKS[name], time.monotonic()
    if method is None:
        command = [sys.executable, __file__, f"--time_of_step={name}", f"--replicas={entry['replicas']}"]
        output = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=True)
        found = {"ms": float(output.stdout.split()[-1])}
    else:
        found = learn(task, strategy, method, entry["seed"], entry["steps"])
        found |= {"metric": task.metric, "margin": task.margin, "overlaps": method.overlaps}
        found |= {"compression": method.compression, "family": method.family, "period": method.period}
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def main(given: argparse.Namespace) -> int:
    """Trains what is missing; returns 1 if the library refuses a method, 3 if the time was up before the end."""
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    began, file = time.monotonic(), File(given.raw)
    missing = [item for item in wanted(given) if not file.has(item[2])]
    if not missing:
        return 0
    file.write(machine.description(starting.PEERS))
    strategy = tfdist.load_strategy("mirrored", devices=given.replicas)
    refused = set[str]()
    for number, (name, method, entry) in enumerate(missing):
        if time.monotonic() - began > given.hours * 3600:
            print(f"{len(missing) - number} trainings are missing: run the command again to continue.", file=sys.stderr)
            return 3
        try:
            entry |= found_by(name, method, entry, strategy)
        except InputError as error:
            refused.add(f"{method}: {error}")
            continue
        file.write(entry)
        shown = entry["ms"] if method is None else entry.get("failure") or entry[entry["metric"]][-1][1]
        print(f"{number + 1}/{len(missing)} {name} {entry['method']} {entry['seed']}: {shown}", flush=True)
    print("\n".join(sorted(refused)), file=sys.stderr)
    return int(bool(refused))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", default="", help="regular expression: only these, and every step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--hours", type=float, default=math.inf, help="no training starts after so many")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the numbers of steps, for a short run")
    parser.add_argument("--raw", type=pathlib.Path, default=pathlib.Path("runs/sync_learning.jsonl"))
    parser.add_argument(
        "--time_of_step", choices=TASKS, help="measure a step of one replica on one core, and nothing else"
    )
    arguments = parser.parse_args()
    if arguments.time_of_step:
        print(time_of_step(arguments.time_of_step, arguments.replicas))
        sys.exit()
    sys.exit(main(arguments))
