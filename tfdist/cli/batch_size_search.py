"""`--find=batch_size`: tries batch sizes of a training command, instead of training."""

import sys

from tfdist.cli.batch_size_trials import TrainingTrials
from tfdist.cli.early_checks import Place
from tfdist.cli.search_files import check, directory, write
from tfdist.cluster.environment import Cluster
from tfdist.config.train_config import TrainConfig
from tfdist.errors import ExitCode, InputError
from tfdist.errors.byte_sizes import byte_size
from tfdist.finders import batch_size
from tfdist.finders.memory_limit import available_bytes
from tfdist.finders.plots import plot_batch_sizes
from tfdist.finders.trials import SECONDS, Trial, Trials
from tfdist.grammar.search import BatchSizeSearch
from tfdist.launcher.job import Job
from tfdist.reporting.run_directory import FIND


def run(config: TrainConfig, search: BatchSizeSearch, place: Place) -> int:
    """Searches by trials in processes of their own; prints and writes what was found. Returns the exit code.

    TensorFlow is imported by the trials only.

    Raises:
      InputError: the output directory cannot be used, or the search is not possible here.
    """
    _check_alone(search, place.cluster)
    if 0 < search.max < config.batch_size:
        raise InputError(
            f"A search for the batch size begins with --batch_size, which must be at most max. Received: "
            f"--batch_size={config.batch_size} and max={search.max}. Raise max, or lower --batch_size."
        )
    job = _job(search)
    folder = directory(config) / FIND
    check(folder)
    memory = search.memory_bytes or available_bytes()
    training = TrainingTrials(config, search)
    print(f"Trying batch sizes, with {search.steps} steps each, in {byte_size(memory)} of memory.", file=sys.stderr)
    print(f"{'batch size':>10}  {'examples/s':>10}  {'memory':>10}", flush=True)
    with Trials(training, job, memory=memory, seconds=SECONDS) as trials:
        result = batch_size.search(
            lambda size: _tried(trials, training, size),
            config.batch_size,
            lambda: search.max or (training.facts.examples if training.facts else 0),
            memory,
            lambda trial: print(_row(trial), flush=True),
        )
    found = {**result.to_json(), **(training.facts._asdict() if training.facts else {})}
    title = f"Speed and memory by batch size: {config.model}, {config.strategy}"
    write(folder, search.name, found, config, plot_batch_sizes(result, title))
    print(result.describe())
    if result.fastest:
        print(
            f"Train with --batch_size={result.fastest.batch_size}. The best learning rate depends on it: search with "
            f"--find=learning_rate --batch_size={result.fastest.batch_size}."
        )
    print(folder / f"{search.name}.png", flush=True)
    return 0 if result.fastest else ExitCode.OUT_OF_MEMORY


def _tried(trials: Trials, training: TrainingTrials, size: int) -> Trial:
    """Tries a size, again with more steps if the first trial was too short to measure its speed."""
    trial = trials(size)
    return trials(size) if training.was_short and not trial.failure else trial


def _job(search: BatchSizeSearch) -> Job:
    try:
        return Job(processes=search.processes, launcher=search.launcher)
    except InputError as error:  # names a flag, which here is a parameter
        raise InputError(f"--find: {str(error).removeprefix('--')}") from error


def _row(trial: Trial) -> str:
    if trial.failure:
        return f"{trial.batch_size:>10}  {'-':>10}  {'-':>10}  {trial.failure}"
    return f"{trial.batch_size:>10}  {trial.examples_per_second:>10.0f}  {byte_size(trial.memory_bytes):>10}"


def _check_alone(search: BatchSizeSearch, cluster: Cluster) -> None:
    if cluster.size > 1:
        raise InputError(
            "A search for the batch size must run in one process, and starts those of its trials itself. Received: a process "
            f"of a job of {cluster.size} ({cluster.source}). Leave out the launcher, and give "
            f'--find="batch_size(processes={cluster.local_size})".'
        )
