"""Trainers of pipelines in processes that have started once, for the benchmarks of pipelines."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from blocks import LEARNING_RATE

RESULT = "RESULT "


class Problem(NamedTuple):
    """What a pipeline trains.

    Attributes:
      make: returns the model.
      data: inputs and targets of a step.
      cut: the value of `--cut`.
    """

    make: Callable[[], Any]
    data: tuple[np.ndarray, np.ndarray]
    cut: str


def equal_cut(blocks: int, stages: int) -> str:
    """Returns the value of `--cut` for stages of equally many blocks, whose last layers are block0, block1, ..."""
    each = blocks // stages
    return ",".join(f"block{number}" for number in range(each - 1, blocks - 1, each))


class Pipelined:
    """A trainer in one of the processes, whose schedule is chosen after the strategy has started."""

    def __init__(
        self,
        strategy: Any,
        schedule: str,
        micro_batches: int,
        problem: Callable[[int], Problem],
        communicates: bool = True,
    ):
        """Builds the model and traces a step.

        Args:
          strategy: a pipeline; its schedule and cut are replaced.
          schedule: as in `--pipeline_schedule`.
          micro_batches: number of micro-batches.
          problem: what is trained, for a number of stages.
          communicates: whether stages wait for each other's results; otherwise they compute with zeros.
        """
        import keras

        import tfdist
        from tfdist.collectives import NoCommunication
        from tfdist.pipelining.schedule_catalog import make_schedule

        strategy.schedule = make_schedule(schedule, strategy.grid.stages, micro_batches)
        model, (x, y), strategy.cut = problem(strategy.schedule.stages)
        pipeline = strategy.pipeline_collectives
        if not communicates:
            strategy.pipeline_collectives = NoCommunication(pipeline)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            self.trainer = tfdist.Trainer(model(), optimizer=keras.optimizers.SGD(LEARNING_RATE), loss="mse")
        self._x, self._y = x, y
        self._strategy, self._schedule = strategy, strategy.schedule
        self.fit(1)
        strategy.pipeline_collectives = pipeline

    def fit(self, steps: int) -> list[dict[str, float]]:
        """Trains, and returns a record for each step."""
        import tfdist

        self._strategy.schedule = self._schedule
        found = self.trainer.fit(
            self._x,
            self._y,
            batch_size=len(self._x),
            steps=steps,
            schedule=tfdist.Schedule(log_every=1, steps_per_call=1),
            checks=tfdist.Checks(measure_every=0),
            verbose=0,
        )
        return [record for record in found.records if record["kind"] == "train"]

    def seconds(self) -> list[float]:
        """Returns the seconds of a step in each process, which begin it together."""
        self._strategy.group.barrier("step", 600)
        mine = self.fit(2)[-1]["step_seconds"]  # the first one waits for the input pipeline
        found: list[float] = self._strategy.group.gather("seconds", mine, 600)
        return found


def results_of(command: Sequence[str], processes: int, launcher: str, minutes: float) -> list[dict[str, Any]]:
    """Starts processes, and returns what they print after `RESULT`; raises `SystemExit` if it is nothing."""
    with tempfile.TemporaryDirectory() as logs:
        launch = [sys.executable, "-m", "tfdist.launch", f"--processes={processes}", f"--log_dir={logs}"]
        started = subprocess.Popen(
            [*launch, f"--launcher={launcher}", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},
        )
        try:
            output = started.communicate(timeout=60 * minutes)[0]
        except subprocess.TimeoutExpired:
            started.terminate()  # the launcher ends its processes
            output = started.communicate()[0]
    found = [json.loads(text) for text in re.findall(rf"{RESULT}({{.*}})", output)]
    if not found:
        raise SystemExit(output[-3000:])
    if started.returncode:
        print(f"Not all was measured: the processes ended with {started.returncode}.", file=sys.stderr)
    return found
