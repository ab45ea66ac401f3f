"""Implements `--find`: searches for a learning rate, or tries batch sizes, each in a training job with its own directory."""

import dataclasses
import json
import logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from tfdist.cli import flags
from tfdist.cli.early_checks import ProcessContext, check_cluster
from tfdist.config.search import BatchSizeSearch, LearningRateSearch
from tfdist.config.train_config import TrainConfig
from tfdist.errors import ExitCode, InputError, byte_size
from tfdist.launcher.job import Job
from tfdist.planning import batch_size
from tfdist.planning.rate_curve import plot_batch_sizes
from tfdist.planning.trials import TRIAL_SECONDS, Trial, TrialProgram, Trials, available_bytes
from tfdist.reporting.file_errors import reraise_as_write_error
from tfdist.reporting.run_directory import FIND, RunDirectory, default_path
from tfdist.storage import StoragePath, path_of, storage_of

_log = logging.getLogger(__name__)

_SCHEMA = 1  # of NAME.json; increased when a key is renamed or removed, or changes its meaning
_SECONDS = 1.0  # for the steps whose speed is measured
_MAX_STEPS = 1000
_FLAGS_RESET_IN_TRIALS = (  # without effect on the cost of a step, and with their defaults in trials
    "coordinator early_stopping lr_scaling base_batch_size warmup_steps warmup_start decay sync callbacks"
    " compression_check_every compression_max_error checkpoint_every best commit_every commit_dir resume overwrite"
    " profile_steps check_sync_every find"
).split()


def _directory(config: TrainConfig) -> StoragePath:
    """Returns the output directory of a search; by default, it is named after dataset and model."""
    name = default_path(config.dataset, config.model, f"find-{time.strftime('%Y%m%d-%H%M%S')}")
    return path_of(os.path.expanduser(config.output_dir or name))


def _check_directory(folder: StoragePath) -> None:
    """Checks and creates the directory of a search; its parent must not contain a run."""
    if RunDirectory(folder.parent).is_run:
        raise InputError(
            f"A search starts with new weights and needs an output directory without a run. Received: {folder.parent}, "
            "which has one. Pass another --output_dir."
        )
    RunDirectory.check(folder.parent)
    RunDirectory(folder).make()


def _write(folder: StoragePath, name: str, results: Mapping[str, Any], config: TrainConfig, png: bytes) -> None:
    flags = {name: value for name, value in dataclasses.asdict(config).items() if name != "output_dir"}
    record = {"schema": _SCHEMA, **results, "flags": flags}
    for suffix, contents in (("json", f"{json.dumps(record, indent=2)}\n".encode()), ("png", png)):
        path = folder / f"{name}.{suffix}"
        with reraise_as_write_error(path):
            storage_of(path).replace(path, contents)


class TrainingTrials:
    """Prepares the training command of each trial of a batch size."""

    def __init__(self, config: TrainConfig, search: BatchSizeSearch):
        # Numbers of training examples and replicas, and the strategy, of the last successful trial; empty before the first.
        self.job_properties: dict[str, Any] = {}
        # Whether its steps took too little time to measure their speed; the next trial has more steps.
        self.was_short = False
        self._config, self._search, self._timed_steps = config, search, search.steps // 2

    def __call__(self, batch_size: int, folder: pathlib.Path) -> TrialProgram:
        """Prepares a trial with files in `folder`."""
        steps, run, file = self._timed_steps, folder / "run", folder / "flags.txt"
        config = dataclasses.replace(
            self._config,
            **{name: getattr(TrainConfig, name) for name in _FLAGS_RESET_IN_TRIALS},
            loggers="",
            measure_every=0,
            batch_size=batch_size,
            steps=2 * steps,
            epochs=0,
            log_every=steps,
            eval_every=2 * steps + 1,
        )
        file.write_text(flags.flags_text(config))
        command = [sys.executable, "-m", "tfdist.train", f"--flagfile={file}", f"--output_dir={run}"]
        return TrialProgram(lambda rank: command, lambda: self._read(RunDirectory(path_of(run))))

    def _read(self, directory: RunDirectory) -> float:
        """Returns the speed of a trial, and adapts the number of steps of the next one to their duration."""
        start = directory.read_starts()[-1]
        self.job_properties = {name: start[name] for name in ("examples", "replicas", "strategy")}
        last_record = [record for record in directory.records() if record["kind"] == "train"][-1]
        step_seconds = float(last_record["step_seconds"])
        # A batch of twice the size takes at most twice as long.
        self.was_short = step_seconds * self._timed_steps < _SECONDS / 2 and self._timed_steps < _MAX_STEPS
        required_steps = math.ceil(_SECONDS / max(step_seconds, 1e-6))
        self._timed_steps = min(max(self._search.steps // 2, required_steps), _MAX_STEPS)
        return float(last_record["examples_per_second"])


def search_batch_size(config: TrainConfig, search: BatchSizeSearch, context: ProcessContext) -> int:
    """Runs trials, prints and writes the result, and returns the exit code. Only the trials import TensorFlow."""
    cluster = context.cluster
    if cluster.size > 1:
        raise InputError(
            "A search for the batch size must run in one process, which starts the processes of each trial. Received: a "
            f"process of a job of {cluster.size} ({cluster.source}). Remove the launcher, and pass "
            f'--find="batch_size(processes={cluster.local_size})".'
        )
    if 0 < search.max < config.batch_size:
        raise InputError(
            f"A search for the batch size starts at --batch_size, which must be at most max. Received: "
            f"--batch_size={config.batch_size} and max={search.max}. Raise max, or lower --batch_size."
        )
    try:
        job = Job(processes=search.processes, launcher=search.launcher)
    except InputError as error:  # names a flag, which here is a parameter
        raise InputError(f"--find: {str(error).removeprefix('--')}") from error
    folder = _directory(config) / FIND
    _check_directory(folder)
    memory = search.memory_bytes or available_bytes()
    training = TrainingTrials(config, search)
    print(f"Trying batch sizes, with {search.steps} steps each, in {byte_size(memory)} of memory.", file=sys.stderr)
    print(f"{'batch size':>10}  {'examples/s':>10}  {'memory':>10}", flush=True)
    with Trials(training, job, memory=memory, seconds=TRIAL_SECONDS) as trials:

        def run_trial(size: int) -> Trial:
            """Tries a size, and repeats it with more steps if the trial was too short to measure its speed."""
            trial = trials(size)
            return trials(size) if training.was_short and not trial.failure else trial

        result = batch_size.search(
            run_trial,
            config.batch_size,
            lambda: search.max or training.job_properties.get("examples", 0),
            memory,
            lambda trial: print(_row(trial), flush=True),
        )
    title = f"Speed and memory by batch size: {config.model}, {config.strategy}"
    _write(folder, search.name, result.to_json() | training.job_properties, config, plot_batch_sizes(result, title))
    print(result.describe())
    if result.fastest:
        print(
            f"Train with --batch_size={result.fastest.batch_size}. The best learning rate depends on it: search with "
            f"--find=learning_rate --batch_size={result.fastest.batch_size}."
        )
    print(folder / f"{search.name}.png", flush=True)
    return 0 if result.fastest else ExitCode.OUT_OF_MEMORY


def _row(trial: Trial) -> str:
    if trial.failure:
        return f"{trial.batch_size:>10}  {'-':>10}  {'-':>10}  {trial.failure}"
    return f"{trial.batch_size:>10}  {trial.examples_per_second:>10.0f}  {byte_size(trial.memory_bytes):>10}"


def search_learning_rate(config: TrainConfig, search: LearningRateSearch, context: ProcessContext) -> int:
    """Searches on all processes of the job; rank 0 prints and writes the result. Returns the exit code."""
    from tfdist.cluster.quiet_tensorflow import load_tensorflow

    context = check_cluster(config, context)
    load_tensorflow()
    from tfdist.cli import run as training
    from tfdist.planning.learning_rate import find_learning_rate
    from tfdist.planning.rate_curve import plot_learning_rates
    from tfdist.reporting import python_logging
    from tfdist.trainer.options import Checks, Schedule

    with training.open_session(config, context) as session:
        strategy = session.strategy
        path = strategy.group.broadcast("output_dir", str(_directory(config)))
        folder = path_of(path) / FIND
        if strategy.is_chief:
            _check_directory(folder)
        trainer = training.make_trainer(session, strategy)
        with python_logging.setup(strategy.cluster.rank, folder / f"rank-{strategy.cluster.rank}.log"):
            _log.info("%s", session.strategy_choice.reason)
            _log.info("Trying %d learning rates from %g to %g.", search.steps, search.min, search.max)
            result = find_learning_rate(
                trainer,
                session.data.train,
                batch_size=config.batch_size,
                **{field.name: getattr(search, field.name) for field in dataclasses.fields(search)},
                schedule=Schedule.from_config(config),
                checks=Checks.from_config(config),
            )
        if strategy.is_chief:
            _write(folder, search.name, dataclasses.asdict(result), config, plot_learning_rates(result))
            print(result.describe())
            if result.suggestion is not None:
                print(_usage(config, result.suggestion))
            print(folder / f"{search.name}.png", flush=True)
    return 0


def _usage(config: TrainConfig, rate: float) -> str:
    from tfdist.optimizers.learning_rate import SCALINGS

    notes = []
    if config.lr_scaling != "none":
        factor = SCALINGS[config.lr_scaling](config.batch_size / config.base_batch_size)
        rate = float(f"{rate / factor:.2g}")
        notes.append(f"--lr_scaling={config.lr_scaling} multiplies it by {factor:g}")
    if config.warmup_steps or config.decay != "none":
        notes.append("it is the highest rate of --warmup_steps and --decay")
    note = f" ({', and '.join(notes)})" if notes else ""
    return f"Train with --learning_rate={rate:g}{note}."


def run(config: TrainConfig, context: ProcessContext) -> int:
    """Runs the search of `--find`, prints the result, and writes it to the output directory; returns the exit code."""
    search = config.parsed.find
    if isinstance(search, BatchSizeSearch):
        return search_batch_size(config, search, context)
    return search_learning_rate(config, search, context)
