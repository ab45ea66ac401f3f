"""Trials of `--find=batch_size`: the training command with another batch size and a few steps, in a directory of its own."""

import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

from tfdist.cli import flags
from tfdist.config.train_config import TrainConfig
from tfdist.finders.trials import Prepared
from tfdist.grammar.search import BatchSizeSearch
from tfdist.reporting.run_directory import RunDirectory
from tfdist.storage import path_of

_SECONDS = 1.0  # for the steps whose speed is measured
_MOST_STEPS = 1000


class Facts(NamedTuple):
    """What a trial has recorded of its job.

    Attributes:
      examples: number of training examples.
      replicas: number of replicas.
      strategy: name of the strategy.
    """

    examples: int
    replicas: int
    strategy: str


class TrainingTrials:
    """Prepares trials.

    Attributes:
      facts: of the last trial that has succeeded; None before.
      was_short: whether its steps took too little time to measure their speed; the next trial has more of them.
    """

    def __init__(self, config: TrainConfig, search: BatchSizeSearch):
        """Initializes the trials of a configuration."""
        self.facts: Facts | None = None
        self.was_short = False
        self._config, self._search, self._timed_steps = config, search, search.steps // 2

    def __call__(self, batch_size: int, folder: pathlib.Path) -> Prepared:
        """Prepares a trial whose files are in a directory."""
        run, file = folder / "run", folder / "flags.txt"
        file.write_text(flags.flags_text(self._trained(batch_size)))
        command = [sys.executable, "-m", "tfdist.train", f"--flagfile={file}", f"--output_dir={run}"]
        return Prepared(lambda rank: command, self._reader(run))

    def _trained(self, batch_size: int) -> TrainConfig:
        """Returns the flags of a trial."""
        half = self._timed_steps
        values = {field.name: field.metadata["flag"].in_trials for field in dataclasses.fields(TrainConfig)}
        return dataclasses.replace(
            self._config,
            **{name: value for name, value in values.items() if value is not None},
            batch_size=batch_size,
            steps=2 * half,
            epochs=0,
            log_every=half,
            eval_every=2 * half + 1,
        )

    def _adapt(self, step_seconds: float) -> None:
        """Adapts the number of steps to their duration; a step of twice the size takes at most twice as long."""
        self.was_short = step_seconds * self._timed_steps < _SECONDS / 2 and self._timed_steps < _MOST_STEPS
        wanted = math.ceil(_SECONDS / max(step_seconds, 1e-6))
        self._timed_steps = min(max(self._search.steps // 2, wanted), _MOST_STEPS)

    def _reader(self, run: pathlib.Path) -> Callable[[], float]:
        def read() -> float:
            directory = RunDirectory(path_of(run))
            start = directory.beginnings()[-1]
            self.facts = Facts(start["examples"], start["replicas"], start["strategy"])
            last = [record for record in directory.records() if record["kind"] == "train"][-1]
            self._adapt(float(last["step_seconds"]))
            return float(last["examples_per_second"])

        return read
