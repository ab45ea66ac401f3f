"""Implements the evaluator of a training job, which evaluates each checkpoint on one device during training.

It is not a member of the job's group: it reads the directory of the run, and adds records to evaluations.jsonl.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfdist.checkpoint.format import complete_checkpoints, step_of
from tfdist.cli import resume
from tfdist.cli.early_checks import check_data, detect_context
from tfdist.cluster import signals
from tfdist.cluster.environment import without_rank_variables
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.cluster.tf_config import EVALUATOR
from tfdist.config.fields import replace_fields
from tfdist.config.strategy_registry import REFERENCE
from tfdist.config.train_config import TrainConfig
from tfdist.config.trained_config import EvaluateConfig
from tfdist.errors import CheckpointError, ExitCode, InputError
from tfdist.launcher.attempt import JOB_NAME_VARIABLE
from tfdist.reporting import RunDirectory
from tfdist.storage import StoragePath, path_of, storage_of

if TYPE_CHECKING:
    from tfdist.data import DatasetSplits
    from tfdist.reporting import Reporter
    from tfdist.trainer.trainer import Trainer

POLL_SECONDS = 1.0
_log = logging.getLogger(__name__)


def main(config: TrainConfig) -> int:
    """Evaluates the checkpoints of the run that the flags describe, until it has finished; returns the exit code."""
    job_name = os.environ.get(JOB_NAME_VARIABLE, "")
    check(config, job_name)
    if config.dry_run:  # the chief describes the run
        return ExitCode.DONE
    environment = without_rank_variables(os.environ)
    check_data(config, detect_context(config, environment))
    record_lock = threading.Lock()  # SIGTERM leaves no incomplete record
    with _exit_on_sigterm(record_lock):
        load_tensorflow()  # imported late, after parsing flags
        from tfdist.cli import run, trained_run
        from tfdist.reporting import python_logging

        directory = RunDirectory(path_of(os.path.expanduser(config.output_dir)))
        train_config = trained_run.adapt_flags(
            dataclasses.asdict(config), directory.path, EvaluateConfig(strategy=REFERENCE, safe_mode=False)
        )
        if not config.ema:  # without averages, which are part of the optimizer's state, none of that state is needed
            train_config = replace_fields(train_config, optimizer="sgd", momentum_correction=False)
        with (
            python_logging.setup(0, directory.logs / f"{EVALUATOR}.log", EVALUATOR),
            run.open_session(train_config, detect_context(train_config, environment)) as session,
        ):
            trainer = run.make_trainer(session, session.strategy)
            trainer.build(session.data.train)
            if session.data.test is None:
                raise InputError(
                    f"An evaluator needs a dataset with test examples. Received: {session.data.name}, which has none. "
                    "Start the job without an evaluator."
                )
            evaluator = CheckpointEvaluator(config, directory, trainer, session.data, record_lock)
            with contextlib.closing(evaluator):
                evaluator.run(CheckpointWatcher(directory, dataclasses.asdict(config), job_name))
    return ExitCode.DONE


def check(config: TrainConfig, job_name: str) -> None:
    """Raises `InputError` if the flags are not those of a run with checkpoints in a known directory."""
    has_checkpoints = any(config.parsed.checkpoint_every) or config.best
    problems = {
        f"evaluates a single run, not a search. Received: --find={config.find}. Remove --find": config.find,
        "needs the directory of the run. Received no --output_dir. Add --output_dir": not config.output_dir,
        "needs checkpoints. Received: --checkpoint_every=0. Add --checkpoint_every": not has_checkpoints,
        "cannot know when the earlier run has been deleted, unless `tfdist launch` starts the evaluator. Received: "
        "--overwrite. Start the evaluator without --overwrite": config.overwrite and not job_name,
    }
    for problem, is_invalid in problems.items():
        if is_invalid:
            raise InputError(f"An evaluator {problem}.")


@contextlib.contextmanager
def _exit_on_sigterm(record_lock: threading.Lock) -> Iterator[None]:
    """Makes SIGTERM end this process with code 0 at once, even during an evaluation, which a restart repeats."""

    def end(number: int) -> None:
        with record_lock:
            signals.print_line(f"The evaluator exits: received {signal.Signals(number).name}.", sys.stderr)
            os._exit(ExitCode.DONE)

    with signals.handle_signals({signal.SIGTERM: end}) if signals.can_set_handlers() else contextlib.nullcontext():
        yield


class CheckpointWatcher:
    """Finds the complete checkpoints of a run, which need not exist yet, and its end."""

    def __init__(self, directory: RunDirectory, flags: dict[str, Any], job_name: str = ""):
        self._directory, self._flags, self._job_name = directory, flags, job_name
        self._is_checked = False
        self._steps = {int(record["step"]) for record in directory.evaluator_records()}

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished and all of its checkpoints are written."""
        return bool(resume.finished_message(resume.AUTO, self._directory, self._flags, self._job_name))

    def new_checkpoints(self) -> list[StoragePath]:
        """Returns the checkpoints that were neither evaluated before nor returned by an earlier call, in order."""
        if resume.overwrites(self._directory, self._flags, self._job_name):  # they will be deleted
            return []
        checkpoints = complete_checkpoints(self._directory.checkpoints)
        if checkpoints and not self._is_checked:
            resume.check_flags(checkpoints, self._flags)
            self._is_checked = True
        paths = [path for path in reversed(checkpoints) if step_of(path) not in self._steps]
        self._steps |= {step_of(path) for path in paths}
        return paths


@dataclasses.dataclass
class CheckpointEvaluator:
    """Evaluates checkpoints with a built trainer on one device, and records the results in the directory of the run.

    Holds the lock `record_lock` while a record is written.
    """

    config: TrainConfig
    directory: RunDirectory
    trainer: "Trainer"
    data: "DatasetSplits"
    record_lock: threading.Lock
    # Created with the first record, because a run begins in an empty directory.
    reporters: "list[Reporter]" = dataclasses.field(default_factory=list)

    def run(self, watcher: CheckpointWatcher) -> None:
        """Evaluates all checkpoints until the run has finished, and adds the results to its curves."""
        from tfdist.reporting.curves import CurvesReporter

        is_finished = False
        while not is_finished:
            is_finished = watcher.is_finished  # before its last checkpoints are listed
            paths = watcher.new_checkpoints()
            for path in paths:
                self.evaluate(path)
            if not (paths or is_finished):
                time.sleep(POLL_SECONDS)
        curves = CurvesReporter(self.directory.curves, self.directory.path.name)
        curves.preload(self.directory.all_records())
        curves.close("done")

    def evaluate(self, path: StoragePath) -> None:
        """Evaluates a checkpoint and records the results; logs a message if it cannot be read, such as after its removal."""
        try:
            self.trainer.load_weights(path, with_optimizer=bool(self.config.ema))
        except CheckpointError as error:
            if storage_of(path).exists(path):
                _log.warning("Skipped %s: %s", path.name, error)
            else:
                _log.info("Skipped %s, which has been removed (--keep=%d).", path.name, self.config.keep)
            return
        self._record(self.trainer.evaluate(self.data.test, batch_size=self.config.batch_size))

    def _record(self, results: dict[str, float]) -> None:
        from tfdist.reporting.loggers import TENSORBOARD
        from tfdist.reporting.plain_reporter import format_number
        from tfdist.reporting.reporter import MetricsFile
        from tfdist.reporting.schema import EVAL
        from tfdist.reporting.tensorboard import TensorBoardReporter

        step = self.trainer.step
        epoch = self.trainer.train_state.examples_used / self.data.train.size
        record = {"kind": EVAL, "step": step, "epoch": epoch, "time": time.time(), **results}
        with self.record_lock:
            if not self.reporters:
                self.reporters.append(MetricsFile(self.directory.evaluations))
                if any(logger.name == TENSORBOARD for logger in self.config.parsed.loggers):
                    self.reporters.append(TensorBoardReporter(self.directory.tensorboard / EVALUATOR))
            for reporter in self.reporters:
                reporter.record(record)
        values = "  ".join(f"{name} {format_number(value)}" for name, value in results.items())
        _log.info("eval after %d steps: %s", step, values)

    def close(self) -> None:
        """Closes the files of records."""
        for reporter in self.reporters:
            reporter.close("")
