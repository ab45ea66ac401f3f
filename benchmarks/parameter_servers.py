"""Updates per second on parameter servers, where one of the workers is slow, always or now and then.

    python benchmarks/parameter_servers.py                 # worker 1 takes three times as long
    python benchmarks/parameter_servers.py --passing=0.1   # a step of any worker does so, with this probability
    python benchmarks/parameter_servers.py --passing=0.1 --workers=3 --modes="sync; ssp(4); backup(workers=1)"

A step waits for a known time per row, so that the cores of this machine do not matter; everything else is real: workers and a
server of `tfdist launch`. The modes take turns; the result is the median of the rounds. The ideal is computed from the waits
that were drawn, without any waiting of one worker for another: the sum of all workers' rates, or the rate of the slowest
worker where each of them computes a share of every update. With backup, an update has fewer rows.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ROWS, SECONDS_PER_ROW, SLOWER = 32, 0.002, 3.0
MODES = ("sync", "ssp(4)", "bounded(4)", "bounded(8)", "async", "multiworker", "measured")


def delay(draws: random.Random, index: int, passing: float) -> float:
    """Returns the factor by which the next step of a worker takes longer."""
    slow = draws.random() < passing if passing else index == 1
    return SLOWER if slow else 1.0


def ideal_rate(mode: str, steps: int, passing: float, workers: int) -> float:
    """Returns the updates per second if no worker waited for another, by the delays of the steps that are measured."""
    # With delays that pass, a worker computes a share of every update, or a whole update of its own.
    shared = bool(passing) and not mode.startswith(("bounded", "async"))
    own_steps = steps if shared else steps // workers
    means = []
    for index in range(workers):
        draws = random.Random(index)
        delays = [delay(draws, index, passing) for _ in range(2 * own_steps)]
        means.append(statistics.mean(delays[own_steps:]))
    update = ROWS * SECONDS_PER_ROW
    return workers / (update * max(means)) if shared else sum(1 / mean for mean in means) / update


def waiting() -> Any:
    """Returns a model whose forward pass in training waits for each row, by the rank of its process."""
    import keras
    import tensorflow as tf

    passing = float(os.environ["PASSING"])
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    draws = random.Random(index)

    class Wait(keras.layers.Layer):
        """Waits in training."""

        def call(self, x: Any, training: bool = False) -> Any:
            if not training:
                return x
            with tf.control_dependencies([tf.py_function(self._wait, [tf.shape(x)[0]], [])]):
                return tf.identity(x)

        @staticmethod
        def _wait(rows: Any) -> None:
            time.sleep(int(rows) * SECONDS_PER_ROW * delay(draws, index, passing))

    return keras.Sequential([keras.Input([8, 8, 1]), Wait(), keras.layers.Flatten(), keras.layers.Dense(10)])


def measure(mode: str, steps: int, passing: float, workers: int) -> float:
    """Returns the updates per second of a run, without its first call."""
    processes, flags = [f"--processes={workers}"], ["--strategy=parameter_server", f"--staleness={mode}"]
    if mode in ("multiworker", "measured"):
        balance = "measured" if mode == "measured" else "equal"
        flags = ["--strategy=multiworker", f"--balance={balance}"]
    else:
        processes.append("--servers=1")
    with tempfile.TemporaryDirectory() as directory:
        run = f"{directory}/run"
        launch = [sys.executable, "-m", "tfdist.launch", *processes, f"--log_dir={directory}/logs", "--"]
        train = [sys.executable, "-m", "tfdist.train", "--model=parameter_servers:waiting", "--dataset=digits", *flags]
        counts = [f"--batch_size={ROWS}", f"--steps={2 * steps}", f"--log_every={steps}", f"--steps_per_call={steps}"]
        environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent), "PASSING": str(passing)}
        command = [*launch, *train, *counts, "--measure_every=0", f"--output_dir={run}"]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        records = [json.loads(line) for line in pathlib.Path(run, "metrics.jsonl").read_text().splitlines()]
    return 1 / [record for record in records if record["kind"] == "train"][-1]["step_seconds"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passing", type=float, default=0.0, help="probability of a slow step")
    parser.add_argument("--steps", type=int, default=100, help="updates between records")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--modes", default="; ".join(MODES), help="separated by semicolons; sync must be one")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {mode.strip(): [] for mode in options.modes.split(";")}
    for _ in range(options.rounds):
        for mode in rates:
            rates[mode].append(measure(mode, options.steps, options.passing, options.workers))
    sync = statistics.median(rates["sync"])
    print(f"{'mode':17} {'updates/s':>9} {'of sync':>8} {'of ideal':>9}   each round")
    for mode, rounds in rates.items():
        rate = statistics.median(rounds)
        ideal = ideal_rate(mode, options.steps, options.passing, options.workers)
        print(f"{mode:17} {rate:9.2f} {rate / sync:8.2f} {rate / ideal:9.2f}   {', '.join(f'{r:.2f}' for r in rounds)}")


if __name__ == "__main__":
    main()
