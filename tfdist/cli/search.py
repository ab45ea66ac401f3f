"""`--find`: runs the search for a batch size or learning rate."""

import dataclasses
import logging

from tfdist.cli import batch_size_search
from tfdist.cli.early_checks import ProcessContext, check_cluster
from tfdist.config.search import BatchSizeSearch, LearningRateSearch, parse_search
from tfdist.config.train_config import TrainConfig
from tfdist.reporting.run_directory import FIND
from tfdist.storage import path_of

_log = logging.getLogger(__name__)


def search_learning_rate(config: TrainConfig, search: LearningRateSearch, context: ProcessContext) -> int:
    """Searches on all processes of the job; rank 0 prints and writes the result. Returns the exit code.

    Raises:
      InputError: the output directory cannot be used, or the search is not possible here.
    """
    from tfdist.cli import tensorflow_import

    context = check_cluster(config, context)
    tensorflow_import.load_tensorflow()
    from tfdist.cli import run as training
    from tfdist.planning.learning_rate import find_learning_rate
    from tfdist.planning.rate_curve import plot_learning_rates
    from tfdist.reporting import python_logging
    from tfdist.trainer.options import Checks, Schedule

    with training.open_session(config, context) as session:
        strategy = session.strategy
        path = strategy.group.broadcast("output_dir", str(batch_size_search.directory(config)))
        folder = path_of(path) / FIND
        if strategy.is_chief:
            batch_size_search.check(folder)
        trainer = training.make_trainer(session, strategy)
        with python_logging.setup(strategy.cluster.rank, folder / f"rank-{strategy.cluster.rank}.log"):
            _log.info("%s", session.detection.reason)
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
            figure = plot_learning_rates(result)
            batch_size_search.write(folder, search.name, result.to_json(), config, figure)
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
    """Runs the search of `--find`, prints the result, and writes it to the output directory; returns the exit code.

    Raises:
      InputError: the output directory cannot be used, or the search is not possible here.
    """
    search = parse_search(config.find)
    if isinstance(search, BatchSizeSearch):
        return batch_size_search.run(config, search, context)
    return search_learning_rate(config, search, context)
