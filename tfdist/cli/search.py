"""`--find`: searches for the learning rate or the batch size of a training command, instead of training."""

import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from tfdist.cli.batch_size_trials import TrainingTrials
from tfdist.cli.cluster_check import check_cluster
from tfdist.cluster.detection import detect_cluster
from tfdist.config.train_config import TrainConfig
from tfdist.errors import ExitCode, InputError
from tfdist.errors.byte_sizes import byte_size
from tfdist.finders.trials import Trial
from tfdist.grammar.search import BatchSizeSearch, LearningRateSearch, parse_search
from tfdist.reporting.file_errors import must_write
from tfdist.reporting.run_directory import FIND, RunDirectory
from tfdist.storage import StoragePath, path_of, storage_of

_log = logging.getLogger(__name__)


def run(config: TrainConfig) -> int:
    """Searches as `--find` says, prints what was found, and writes it to the output directory; returns the exit code.

    Raises:
      InputError: the output directory cannot be used, or the search is not possible here.
    """
    search = parse_search(config.find)
    if isinstance(search, BatchSizeSearch):
        return _batch_size(config, search)
    return _learning_rate(config, search)


def _learning_rate(config: TrainConfig, search: LearningRateSearch) -> int:
    from tfdist.cli import tensorflow_import

    check_cluster(config)
    tensorflow_import.load_tensorflow()
    from tfdist.cli import session
    from tfdist.finders.learning_rate import find_learning_rate
    from tfdist.finders.plots import plot_learning_rates
    from tfdist.reporting import log
    from tfdist.trainer.options import Checks, Schedule

    with session.opened(config) as opened:
        strategy = opened.strategy
        path = strategy.group.broadcast("output_dir", str(directory(config)))
        folder = path_of(path) / FIND
        if strategy.is_chief:
            check(folder)
        trainer = session.make_trainer(opened, strategy)
        with log.setup(strategy.cluster.rank, folder / f"rank-{strategy.cluster.rank}.log"):
            _log.info("%s", opened.detection.reason)
            _log.info("Trying %d learning rates from %g to %g.", search.steps, search.min, search.max)
            result = find_learning_rate(
                trainer,
                opened.data.train,
                batch_size=config.batch_size,
                **{field.name: getattr(search, field.name) for field in dataclasses.fields(search)},
                schedule=Schedule.of(config),
                checks=Checks.of(config),
            )
        if strategy.is_chief:
            picture = plot_learning_rates(result)
            facts = {**result.to_json(), "flags": shared_flags(config)}
            write(folder, search.name, facts, picture)
            print(result.describe())
            if result.suggestion is not None:
                print(_use(config, result.suggestion))
            print(folder / f"{search.name}.png", flush=True)
    return 0


def _use(config: TrainConfig, rate: float) -> str:
    """Returns how to train with a learning rate, given the flags that change it."""
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


def _batch_size(config: TrainConfig, search: BatchSizeSearch) -> int:
    """Does not import TensorFlow; its trials do."""
    from tfdist.finders.batch_size import search as search_sizes
    from tfdist.finders.memory_limit import available_bytes
    from tfdist.finders.plots import plot_batch_sizes
    from tfdist.finders.trials import SECONDS, Trials

    _check_alone(search)
    folder = directory(config) / FIND
    check(folder)
    memory = search.memory_bytes or available_bytes()
    training = TrainingTrials(config, search)
    print(f"Trying batch sizes, with {search.steps} steps each, in {byte_size(memory)} of memory.", file=sys.stderr)
    print(f"{'batch size':>10}  {'examples/s':>10}  {'memory':>10}", flush=True)
    with Trials(
        training, memory=memory, seconds=SECONDS, processes=search.processes, launcher=search.launcher
    ) as trials:

        def run(size: int) -> Trial:
            found = trials(size)
            return trials(size) if training.was_short and not found.refused else found

        result = search_sizes(
            run,
            config.batch_size,
            lambda: search.max or (training.facts.examples if training.facts else 0),
            memory,
            lambda trial: print(_row(trial), flush=True),
        )
    facts = {**result.to_json(), **(training.facts._asdict() if training.facts else {}), "flags": shared_flags(config)}
    title = f"Speed and memory by batch size: {config.model}, {config.strategy}"
    write(folder, search.name, facts, plot_batch_sizes(result, title))
    print(result.describe())
    if result.fastest:
        print(
            f"Train with --batch_size={result.fastest.batch_size}. The best learning rate depends on it: search with "
            f"--find=learning_rate --batch_size={result.fastest.batch_size}."
        )
    print(folder / f"{search.name}.png", flush=True)
    return 0 if result.fastest else ExitCode.OUT_OF_MEMORY


def _row(trial: Trial) -> str:
    if trial.refused:
        return f"{trial.batch_size:>10}  {'-':>10}  {'-':>10}  {trial.refused}"
    return f"{trial.batch_size:>10}  {trial.examples_per_second:>10.0f}  {byte_size(trial.memory_bytes):>10}"


def _check_alone(search: BatchSizeSearch) -> None:
    cluster = detect_cluster(os.environ)
    if cluster.size > 1:
        raise InputError(
            "A search for the batch size starts the processes of its trials, and runs itself in one. Received: a process of "
            f"a job of {cluster.size} ({cluster.source}). Leave out the launcher, and give "
            f'--find="batch_size(processes={cluster.local_size})".'
        )


def directory(config: TrainConfig) -> StoragePath:
    """Returns the output directory of a search, which is named after data set and model if it is not given."""
    names = (
        "".join(c if c.isalnum() or c in "._" else "_" for c in text.partition("(")[0])
        for text in (config.dataset, config.model)
    )
    name = f"runs/{'-'.join(names)}-find-{time.strftime('%Y%m%d-%H%M%S')}"
    return path_of(os.path.expanduser(config.output_dir or name))


def check(folder: StoragePath) -> None:
    """Checks that a run could begin where a search is going to write, and creates its directory.

    Raises:
      InputError: there is a run, or the directory cannot be written.
    """
    if RunDirectory(folder.parent).is_run:
        raise InputError(
            f"A search begins with new weights and needs an output directory without a run. Received: {folder.parent}, "
            "which is one. Give another --output_dir."
        )
    RunDirectory.check(folder.parent)
    RunDirectory(folder).make()


def shared_flags(config: TrainConfig) -> Mapping[str, Any]:
    """Returns the flags of a search, without its directory, as values of JSON."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name != "output_dir"}


def write(folder: StoragePath, name: str, facts: Mapping[str, Any], picture: bytes) -> None:
    """Writes the result of a search, as NAME.json and NAME.png."""
    for path, contents in (
        (folder / f"{name}.json", f"{json.dumps(facts, indent=2)}\n".encode()),
        (folder / f"{name}.png", picture),
    ):
        with must_write(path):
            storage_of(path).replace(path, contents)
