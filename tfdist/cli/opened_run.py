"""The run of `tfdist train`: its directory, from the choice of a path to the summary at the end."""

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from tfdist.checkpoint.manager import Checkpoints
from tfdist.cli import run_start
from tfdist.cli.flag_warnings import warn_of_flags
from tfdist.cli.resume import Origin
from tfdist.cli.run_end import Run
from tfdist.cli.session import Session
from tfdist.config.fields import replaced
from tfdist.config.train_config import TrainConfig
from tfdist.coordination.timeouts import long_timeout
from tfdist.errors import WriteError, describe_error
from tfdist.launcher.attempt import LAUNCHED_VARIABLE
from tfdist.pipelining.schedules import plot
from tfdist.process.terminal import is_watched
from tfdist.reporting import (
    LoggedRun,
    NullLedger,
    NullProfile,
    ProfileWindow,
    Reporter,
    RunDirectory,
    chief_reporter,
    python_logging,
)
from tfdist.reporting.logger_catalog import check_own, make_loggers
from tfdist.storage import path_of
from tfdist.trainer.options import Reporting
from tfdist.trainer.trainer import Trainer

_log = logging.getLogger(__name__)


class Target(NamedTuple):
    """Where a run will be written, and what it will resume from.

    Attributes:
      directory: directory of the run.
      config: the run's configuration, with that directory.
      origin: checkpoints to resume from.
      finished: what to say instead of training, because the run has finished; empty if it has not.
    """

    directory: RunDirectory
    config: TrainConfig
    origin: Origin
    finished: str = ""


def target(session: Session) -> Target:
    """Chooses the directory of a run and what to resume from, without writing anything; every process must call it.

    Raises:
      InputError: the directory contains something else, or there is nothing to resume from where that was requested;
        or a logger of the user's own cannot be imported.
    """
    check_own(session.config.loggers)
    directory = RunDirectory(path_of(_path(session)))
    config = replaced(session.config, output_dir=str(directory.path))
    if finished := run_start.finished(config, directory, session.strategy):
        return Target(directory, config, Origin([], True), finished)
    return Target(directory, config, run_start.origin(config, directory, session.strategy))


@contextlib.contextmanager
def opened_run(session: Session, target: Target, trainer: Trainer, *, loading_seconds: float) -> Iterator[Run]:
    """Locks the directory of a run, restores its state, and records its start; every process must enter it.

    Args:
      session: strategy, data and configuration of the run.
      target: its directory and what it resumes from.
      trainer: a built trainer.
      loading_seconds: seconds that loading TensorFlow took, for the log.

    Raises:
      InputError: a checkpoint is of another model; its batch cannot be divided between the current replicas; another
        process writes to the directory, or it cannot be written.
    """
    strategy = session.strategy
    directory, config, origin, _ = target
    with contextlib.ExitStack() as stack:
        begun = run_start.begin(origin, trainer, session.data.train.size, config, directory, stack)
        stack.enter_context(python_logging.setup(strategy.cluster.rank, directory.log(strategy.cluster.rank)))
        _log.info("%s", session.detection.reason, extra=python_logging.ONLY_IN_FILE)
        if trainer.train_state.resumed_from:
            _log.info("Resuming from %s.", trainer.train_state.resumed_from, extra=python_logging.ONLY_IN_FILE)
        _log.info("Loading TensorFlow took %.1f s.", loading_seconds, extra=_in_file_if_shown())
        warn_of_flags(config, strategy, trainer.model)
        if strategy.is_chief:
            _warn_of_lost_progress(begun.checkpoints, trainer.train_state.resumed_from, config, directory)
        reporting = dataclasses.replace(
            _reporting(config, directory, begun.ledger, strategy.is_chief),
            strategy_reason=session.detection.why,
            record_all_reduce_table=directory.write_all_reduce_table,
            record_timelines=lambda timelines: directory.write_timeline(plot.png(timelines)),
            description={
                "output": str(directory.path),
                "resuming": f"from {path}" if (path := trainer.train_state.resumed_from) else "",
            },
        )
        with _closing(reporting.reporter):
            yield Run(directory, strategy.is_chief, begun.checkpoints, reporting, time.monotonic())


def _in_file_if_shown() -> dict[str, bool]:
    """Returns where to log what a terminal has shown as a status already."""
    return python_logging.ONLY_IN_FILE if is_watched(sys.stderr) else {}


def _reporting(config: TrainConfig, directory: RunDirectory, ledger: NullLedger, is_chief: bool) -> Reporting:
    if not is_chief:
        profile = NullProfile.with_boundaries(config.profile_steps) if config.profile_steps else NullProfile()
        return Reporting(ledger=ledger, profile=profile)
    profile = ProfileWindow(config.profile_steps, directory.tensorboard) if config.profile_steps else NullProfile()
    run = LoggedRun(directory, dataclasses.asdict(config))
    reporter = chief_reporter(directory, sys.stderr, directory.records(), make_loggers(config.loggers, run))
    return Reporting(reporter=reporter, profile=profile, ledger=ledger)


def _path(session: Session) -> str:
    """Returns the path of the run's directory, the same on every process."""
    config, strategy = session.config, session.strategy
    # A job restarted by a launcher continues in the same directory, although another size may imply another strategy.
    own = os.environ.get(LAUNCHED_VARIABLE) or f"{strategy.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    name = f"runs/{_file_name(config.dataset)}-{_file_name(config.model)}-{own}"
    with long_timeout("its data") as deadline:
        return strategy.group.broadcast("output_dir", os.path.expanduser(config.output_dir or name), deadline)


def _file_name(spec: str) -> str:
    """Returns the name of a specification in a form suitable for a directory name."""
    return "".join(c if c.isalnum() or c in "._" else "_" for c in spec.partition("(")[0])


def _warn_of_lost_progress(
    checkpoints: Checkpoints, resumed_from: str, config: TrainConfig, directory: RunDirectory
) -> None:
    if checkpoints.commit_every and not config.commit_dir and not any(config.parsed.checkpoint_every):
        _log.warning(
            "Without --commit_dir, commits are kept in the launcher's memory and are lost when the launcher ends. "
            "Received: --commit_every=%d with --checkpoint_every=0. Add --checkpoint_every or --commit_dir.",
            config.commit_every,
        )
    *earlier, _ = directory.beginnings()
    if earlier and not resumed_from and directory.has_trained:
        _log.warning(
            "This run's %s left no checkpoint or commit, so it starts at step 0 with new weights%s. To avoid this, set "
            "or lower --checkpoint_every, or give commits a --commit_dir.",
            "earlier start" if len(earlier) == 1 else f"{len(earlier)} earlier starts",
            f"; the old records are in {directory.dropped}" if directory.has_dropped else "",
        )


@contextlib.contextmanager
def _closing(reporter: Reporter) -> Iterator[None]:
    """Reports how the run ended, so that its directory is complete; the command prints the error."""
    try:
        yield
    except BaseException as error:
        _close(reporter, describe_error(error), is_written_down=isinstance(error, WriteError))
        raise
    _close(reporter, "done")


def _close(reporter: Reporter, outcome: str, is_written_down: bool = False) -> None:
    """Closes the reporter; a failed last write is only a warning, as the outcome is known, and is reported once."""
    try:
        reporter.close(outcome)
    except WriteError as error:
        if not is_written_down:
            _log.warning("%s", error)
