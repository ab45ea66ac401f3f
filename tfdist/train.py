"""Train a Keras model with the strategy chosen by flags or the environment."""

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tfdist.checkpoint import in_memory
from tfdist.cli import command, flags, startup
from tfdist.config.train_config import TrainConfig
from tfdist.errors import WriteError, exit_codes
from tfdist.storage import path_of

if TYPE_CHECKING:
    from tfdist.cli.session import Session
    from tfdist.reporting import Reporter

_log = logging.getLogger("tfdist.train")


def main(config: TrainConfig) -> int:
    """Runs one training; returns the exit code."""
    in_memory.home(config.commit_every, config.commit_dir)  # reports an invalid directory before anything starts
    startup.load_tensorflow()  # imported late, so that flags are parsed and help is printed before
    from tfdist.cli import session

    with session.opened(config) as opened:
        if config.dry_run:
            return _describe(opened)
        return _train(opened)


def _train(opened: "Session") -> int:
    from tfdist import reporting
    from tfdist.cli import run_start, session
    from tfdist.coordination.timeouts import long_timeout
    from tfdist.launcher.attempt import LAUNCHED_VARIABLE
    from tfdist.reporting import log
    from tfdist.reporting.writing import must_write

    config, strategy = opened.config, opened.strategy
    # A job restarted by a launcher continues in the same directory, although another size may imply another strategy.
    own = os.environ.get(LAUNCHED_VARIABLE) or f"{strategy.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    name = f"runs/{_words(config.dataset)}-{_words(config.model)}-{own}"
    with long_timeout("its data") as deadline:
        path = strategy.group.broadcast("output_dir", os.path.expanduser(config.output_dir or name), deadline)
    config = dataclasses.replace(config, strategy=opened.detection.strategy, output_dir=path)
    directory = reporting.RunDirectory(path_of(path))
    origin = run_start.origin(config, directory, strategy)
    # Reports errors in the model before anything is written.
    trainer = session.make_trainer(opened, strategy)
    trainer.build(opened.data.train)
    with contextlib.ExitStack() as stack:
        begun = run_start.begin(origin, trainer, opened.data.train.size, config, directory, stack)
        stack.enter_context(log.setup(strategy.cluster.rank, directory.log(strategy.cluster.rank)))
        _log.info("%s", opened.detection.reason)
        if begun.checkpoint:
            _log.info("Resuming from %s.", begun.checkpoint)
        if strategy.is_chief:
            begun.warn(config, directory)
        reporter = begun.reporter(directory, strategy)
        profile = (
            reporting.ProfileWindow(config.profile_steps, directory.tensorboard)
            if config.profile_steps and strategy.is_chief
            else reporting.NullProfile()
        )
        with _closing(reporter):
            history = trainer.fit(
                opened.data,
                batch_size=config.batch_size,
                elastic_batch=config.elastic_batch,
                steps=config.steps,
                epochs=config.epochs,
                log_every=config.log_every,
                eval_every=config.eval_every,
                steps_per_call=config.steps_per_call,
                reporter=reporter,
                profile=profile,
                measure_every=config.measure_every,
                compression_check_every=config.compression_check_every,
                compression_max_error=config.compression_max_error,
                checkpoints=begun.checkpoints,
                ledger=begun.ledger,
                check_sync_every=config.check_sync_every,
                check_sync=config.check_sync,
                stall_warning_seconds=config.stall_warning_seconds,
                stall_shutdown_seconds=config.stall_shutdown_seconds,
            )
            with must_write(directory.model):
                trainer.save(str(directory.model))
    if strategy.is_chief:
        last = (history.records or directory.records())[-1]
        numbers = "  ".join(f"{k} {v:.4f}" for k, v in last.items() if k == "loss" or "accuracy" in k)
        print(f"{last['kind']} after {last['step']} steps: {numbers}\n{path}", flush=True)
    return 0


@contextlib.contextmanager
def _closing(reporter: "Reporter") -> Iterator[None]:
    """Reports how the run ended, so that its directory is complete; the command prints the error."""
    try:
        yield
    except BaseException as error:
        _close(reporter, exit_codes.of_error(error), is_written_down=isinstance(error, WriteError))
        raise
    _close(reporter, "done")


def _close(reporter: "Reporter", outcome: str, is_written_down: bool = False) -> None:
    """Closes the reporter; a failed last write is only a warning, as the outcome is known, and is reported once."""
    try:
        reporter.close(outcome)
    except WriteError as error:
        if not is_written_down:
            _log.warning("%s", error)


def _describe(opened: "Session") -> int:
    """Prints a description of the run."""
    from tfdist.cli import open_strategy, session
    from tfdist.data import rows, steps_in_epochs

    config, strategy = opened.config, opened.strategy
    trainer = session.make_trainer(opened, strategy)
    trainer.build(opened.data.train)
    hosts = open_strategy.hosts(strategy)
    if not strategy.is_chief:
        return 0
    size = opened.data.train.size
    trainer.batch_schedule(size, batch_size=config.batch_size, elastic_batch=config.elastic_batch)
    parts = strategy.batch_parts
    shares = _span(rows(config.batch_size, r, parts)[1] for r in range(parts))
    micro = parts * config.accumulate_steps
    steps = config.steps or steps_in_epochs(config.epochs, size, config.batch_size)
    print(flags.flags_text(dataclasses.replace(config, strategy=opened.detection.strategy)), end="")
    lines = {
        "strategy": opened.detection.reason,
        "processes": f"{strategy.cluster.size} on {', '.join(dict.fromkeys(hosts))}",
        "replicas": str(parts),
        "global batch": f"{config.batch_size} examples",
        "per replica": f"{shares} examples",
        "per micro-step": f"{_span(rows(config.batch_size, r, micro)[1] for r in range(micro))} examples, "
        f"{config.accumulate_steps} a step",
        "training set": f"{size} examples",
        "test set": f"{opened.data.test.size} examples" if opened.data.test else "none",
        "steps": f"{steps} ({steps * config.batch_size / size:.2f} epochs)",
        "parameters": f"{trainer.model.count_params():,}",
    }
    for name, value in lines.items():
        print(f"{name:>15}: {value}")
    return 0


def _span(numbers: Iterable[int]) -> str:
    """Returns equal or nearly equal numbers as text."""
    return " or ".join(str(number) for number in sorted(set(numbers)))


def _words(spec: str) -> str:
    """Returns the name of a specification in a form suitable for a directory name."""
    return "".join(c if c.isalnum() or c in "._" else "_" for c in spec.partition("(")[0])


if __name__ == "__main__":
    sys.exit(command.run("train", flags.define, lambda values: main(flags.config(values)), about=__doc__))
