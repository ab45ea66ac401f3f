"""Memory of a pipeline's stages by schedule: how far a step raises each process's resident memory.

    python benchmarks/pipeline_memory.py
    python benchmarks/pipeline_memory.py --processes=2 --micro_batches=2,8 --schedules=1f1b

Each stage is a chain of equal layers whose outputs are what its backward pass needs: A bytes for each micro-batch. The table
has, for each process, the peak of some steps beyond the memory before the model is built, in units of A, beside the live
activations that the schedule predicts. What both schedules have in common, such as the graph, is in each peak: compare rows.
Each row is a run of its own, as memory that has been used stays with a process. On Linux alone.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
from pipelined import RESULT, Pipelined, Problem, equal_cut, results_of

LAYERS, WIDTH, ROWS = 8, 128, 8192  # of a stage
FEATURES = 8  # of inputs and outputs, which are small beside the activations
UNIT = LAYERS * WIDTH * ROWS * 4  # bytes: A


def chain(stages: int) -> Any:
    """Returns a model of equal stages."""
    import keras

    layers = keras.layers
    x = inputs = keras.Input((FEATURES,))
    for number in range(stages * LAYERS):
        inside = (number + 1) % LAYERS
        name = f"inner{number}" if inside else f"block{number // LAYERS}"
        x = layers.Dense(WIDTH, activation="relu", name=name)(x)
    return keras.Model(inputs, layers.Dense(FEATURES)(x))


def problem_of(micro_batches: int) -> Callable[[int], Problem]:
    """Returns the model and zeros for it, for a number of stages."""
    x = np.zeros((micro_batches * ROWS, FEATURES), "float32")
    return lambda stages: Problem(lambda: chain(stages), (x, x), equal_cut(stages, stages))


def peak() -> int:
    """Returns the most bytes of resident memory since `/proc/self/clear_refs` was written."""
    [line] = [line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def rank_program(given: argparse.Namespace) -> None:
    """Measures in one of the processes; the first one prints results."""
    import tfdist

    strategy = tfdist.load_strategy("pipeline", intra_op_threads=1, pipeline_schedule="gpipe", micro_batches=1)
    micro_batches = int(given.micro_batches)
    before = psutil.Process().memory_info().rss
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    Pipelined(strategy, given.schedules, micro_batches, problem_of(micro_batches)).fit(2)
    peaks = strategy.group.gather("peaks", (peak() - before) / UNIT, 600)
    if strategy.is_chief:
        print(RESULT + json.dumps({"peaks": peaks, "live": strategy.schedule.live_activations()}), flush=True)
    strategy.group.barrier("end")
    strategy.close()


def main() -> None:
    """Starts the processes; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--launcher", choices=("tensorflow", "horovod"), default="tensorflow")
    parser.add_argument("--schedules", default="gpipe,1f1b")
    parser.add_argument("--micro_batches", default="4,8")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_program(given)
        return
    print(f"A is {UNIT / 2**20:.0f} MiB\n\n| schedule | M | peak of each stage / A | live activations |")
    print("| --- | --- | --- | --- |")
    for name in given.schedules.split(","):
        for micro_batches in given.micro_batches.split(","):
            command = [sys.executable, __file__, "--rank", f"--schedules={name}", f"--micro_batches={micro_batches}"]
            [row] = results_of(command, given.processes, given.launcher, 10)
            peaks, live = (", ".join(f"{value:.1f}" for value in row[key]) for key in ("peaks", "live"))
            print(f"| {name} | {micro_batches} | {peaks} | {live} |", flush=True)


if __name__ == "__main__":
    main()
