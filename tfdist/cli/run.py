"""Implements a run of `tfdist train`: starts the strategy, creates the trainer, locks the directory, resumes, and reports."""

import contextlib
import dataclasses
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import keras

from tfdist import data, keras_internals, models
from tfdist.checkpoint import in_memory
from tfdist.checkpoint.best import BestValue
from tfdist.checkpoint.format import Checkpoint, LockError, lock, remove_remnants
from tfdist.checkpoint.manager import Checkpoints
from tfdist.checkpoint.replication import check_can_transfer, ranks_by_directory, replicate_newest_checkpoint
from tfdist.cli import flags, open_strategy, resume
from tfdist.cli.early_checks import ProcessContext
from tfdist.cli.output import Output
from tfdist.cluster.terminal import can_overwrite
from tfdist.config.conflicts import JobProperties, effect_warnings
from tfdist.config.decay import Plateau
from tfdist.config.fields import field_names, replace_fields, unsafe_fields
from tfdist.config.spec import call_user_function, load_object, parse
from tfdist.config.staleness import REPLAY
from tfdist.config.train_config import TrainConfig
from tfdist.coordination.group import long_timeout
from tfdist.data import catalog, row_range, steps_in_epochs
from tfdist.data.augmentations import parse_augmentations
from tfdist.data.batch_schedule import GLOBAL
from tfdist.data.row_partition import apportion
from tfdist.distribution.factory import declaration
from tfdist.distribution.strategy import Strategy
from tfdist.distribution.strategy_selection import StrategyChoice
from tfdist.errors import InputError, WriteError, count_of, describe_error, one_line
from tfdist.gradients import Clip, parse_loss_scale
from tfdist.gradients.compression import check as check_compression
from tfdist.launcher.attempt import JOB_NAME_VARIABLE
from tfdist.layers.recompute import recompute
from tfdist.optimizers import make_learning_rate
from tfdist.optimizers.catalog import create_loss, create_metrics, create_optimizer
from tfdist.pipelining import timeline
from tfdist.reporting import LoggedRun, Reporter, RunDirectory, python_logging
from tfdist.reporting.display import chief_reporter
from tfdist.reporting.file_errors import reraise_as_write_error
from tfdist.reporting.ledger_file import LedgerFile, NullLedger, UpdatesFile
from tfdist.reporting.loggers import check_user_defined, make_loggers
from tfdist.reporting.profile import NullProfile, ProfileWindow
from tfdist.reporting.run_directory import default_path, flag_values
from tfdist.reporting.run_summary import best_evaluation, duration, png
from tfdist.reporting.schema import EVAL, main_metrics
from tfdist.reporting.warn_once import warn_once
from tfdist.storage import path_of, storage_of
from tfdist.synchronization.federated import divide_among_clients
from tfdist.synchronization.server_updates import recorded_run, recorded_updates
from tfdist.trainer.early_stopping import EarlyStopping, ReduceLROnPlateau
from tfdist.trainer.options import Reporting
from tfdist.trainer.trainer import Trainer

_SLOW_DISK = "a slow disk"  # a possible reason why the others wait for rank 0
_REPLAYED_FLAGS = ("model", "dataset", "batch_size", "seed")
_LEARNING_RATE_FLAGS = ("learning_rate", "lr_scaling", "base_batch_size")
_log = logging.getLogger(__name__)


def warn_about_flags(config: Any, strategy: Strategy, model: keras.Model | None = None) -> None:
    """Logs a warning on the chief for each flag without effect; the model is None if it is not known."""
    if not strategy.is_chief:
        return
    job = JobProperties(
        replicas=strategy.replicas,
        sums_gradients=strategy.sums_gradients,
        has_batch_norm=model is None
        or any(isinstance(layer, keras.layers.BatchNormalization) for layer in keras_internals.layers_of(model)),
        uses_data_dir=not hasattr(config, "dataset") or catalog.takes_data_dir(config.dataset),
    )
    for text in effect_warnings(config, job, declaration(config.strategy)):
        warn_once(text)


def make_callbacks(config: TrainConfig) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of `--early_stopping`, `--decay=plateau` and `--callbacks`."""
    monitor, decay = config.parsed.early_stopping, config.parsed.decay
    return [
        *([EarlyStopping(monitor.metric, mode=monitor.mode, **monitor.args)] if monitor else []),
        *([ReduceLROnPlateau(**dataclasses.asdict(decay))] if isinstance(decay, Plateau) else []),
        *_user_callbacks(config.callbacks, config.output_dir),
    ]


def _user_callbacks(text: str, output_dir: str) -> Sequence[Any]:
    """Returns the callbacks that the user's function creates; it may take the directory of the run as `output_dir`."""
    if not text:
        return []
    spec = parse(text)
    result = call_user_function("--callbacks", load_object(spec.name), spec, output_dir=output_dir)
    callbacks = result if isinstance(result, list | tuple) else [result]
    if invalid := [type(item).__name__ for item in callbacks if not isinstance(item, keras.callbacks.Callback)]:
        raise InputError(
            f"--callbacks={text} must return a keras.callbacks.Callback or a list of them. Received: {invalid[0]}."
        )
    return callbacks


# Strategy, data and model


@dataclasses.dataclass(frozen=True)
class Session:
    """The strategy and the data of a command after startup."""

    config: Any
    strategy_choice: StrategyChoice
    strategy: Strategy
    data: data.DatasetSplits


@contextmanager
def open_session(config: TrainConfig, context: ProcessContext | None = None) -> Iterator[Session]:
    """Starts the strategy, checks that all processes have the same flags and versions, and loads the data.

    The outcome of the session is reported to the other processes. If one of them is lost, this process exits with code 5.
    The context of this process is detected by default.
    """
    check_compression(config.compression)  # reports invalid values before anything starts
    _gradient_options(config)
    parse_augmentations(config.augment)
    with open_strategy.running_strategy(config, context) as (config, strategy_choice, strategy):
        # With elastic_batch=replica, the size depends on the initial number of replicas. Clients' batches are not divided.
        if config.elastic_batch == GLOBAL and not config.parsed.sync.trains_clients:
            strategy.check_batch_size(config.batch_size, config.accumulate_steps)
        splits = data.load(config.dataset, config.data_dir)
        splits = dataclasses.replace(splits, train=data.augmented(splits.train, config.augment))
        yield Session(config, strategy_choice, strategy, splits)


def with_clients(session: Session) -> Session:
    """Returns the session with the training data divided between clients, if `--sync` has clients."""
    config, splits = session.config, session.data
    train = divide_among_clients(config.parsed.sync, splits.train, config.batch_size, config.seed)
    return dataclasses.replace(session, data=dataclasses.replace(splits, train=train))


def make_trainer(session: Session, strategy: Strategy) -> Trainer:
    """Creates the model and the optimizer in a strategy's scope, with the configured seed."""
    config = session.config
    keras.utils.clear_session(free_memory=False)
    if config.precision != "float32":
        keras.config.set_dtype_policy(config.precision)
    keras.utils.set_random_seed(config.seed)
    with strategy.scope():
        sizes: Any = session.data.input_shape, session.data.classes  # may be unknown for a user-defined model
        model = models.build(config.model, *sizes)
        if config.batch_norm == "synchronized":
            model = models.with_batch_norm(model, "synchronized")
        recompute(model, config.recompute)
        return Trainer(
            model,
            optimizer=create_optimizer(config.optimizer, _learning_rate(session), config.momentum_correction),
            loss=create_loss(config.loss),
            metrics=create_metrics(config.metrics),
            seed=config.seed,
            jit_compile=config.jit_compile,
            ema=config.ema,
            sync=config.parsed.sync,
            balance=config.balance,
            **_gradient_options(config),
        )


def _learning_rate(session: Session) -> Any:
    config, size = session.config, session.data.train.size
    examples_per_step = config.parsed.sync.examples_per_step(size, config.batch_size)
    return make_learning_rate(
        config.learning_rate,
        scaling=config.lr_scaling,
        base_batch_size=config.base_batch_size,
        batch_size=config.batch_size,
        warmup_steps=config.warmup_steps,
        warmup_start=config.warmup_start,
        decay=config.decay,
        total_steps=config.steps or steps_in_epochs(config.epochs, size, examples_per_step),
    )


def _gradient_options(config: TrainConfig) -> dict[str, Any]:
    return {
        "accumulate_steps": config.accumulate_steps,
        "loss_scale": parse_loss_scale(config.loss_scale),
        "max_skipped_steps": config.max_skipped_steps,
        "clip": Clip(norm=config.clip_norm, value=config.clip_value),
        "compression": config.compression,
        "compression_min_bytes": config.compression_min_bytes,
        "bucket_bytes": int(config.bucket_mb * 2**20),
        "bucket_order": config.bucket_order,
    }


# The directory, and the checkpoints from which the run resumes


def choose_directory_and_origin(
    session: Session, decision: tuple[str, resume.Origin] | None
) -> tuple[TrainConfig, resume.Origin, str]:
    """Chooses the directory and the origin of a run, without writing anything; every process must call it.

    Returns:
      The configuration, with the directory; the checkpoints to resume from; and the message to print instead of training if the
      run has finished, else "".

    Raises:
      InputError: the directory contains other files, there is no checkpoint to resume from although one was requested, or a
        user-defined logger cannot be imported.
    """
    config, strategy = session.config, session.strategy
    check_user_defined(config.parsed.loggers)
    if strategy.remote and strategy.remote.staleness.kind == REPLAY:
        problem = _replay_problem(session) if strategy.is_chief else ""
        if problem := strategy.group.broadcast("replayed run", problem):
            raise InputError(problem)
    # A job restarted by a launcher continues in the same directory, although another size may imply another strategy.
    ending = os.environ.get(JOB_NAME_VARIABLE) or f"{strategy.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = os.path.expanduser(config.output_dir or default_path(config.dataset, config.model, ending))
    with long_timeout("its data") as deadline:
        directory = RunDirectory(path_of(strategy.group.broadcast("output_dir", path, deadline)))
    config = replace_fields(config, output_dir=str(directory.path))
    if strategy.is_chief and not decision:
        decision = resume.decide_start(config, directory)
    with long_timeout(_SLOW_DISK) as deadline:
        message, origin = strategy.group.broadcast("origin", decision, deadline)
    return config, resume.Origin(*origin), message


def _replay_problem(session: Session) -> str:
    """Returns why the updates of `--staleness=replay(RUN)` cannot be repeated: another task or job, or too few steps."""
    config, strategy = session.config, session.strategy
    assert strategy.remote
    run = recorded_run(strategy.remote.staleness.path)
    try:
        updates, starts, saved_flags = recorded_updates(run), run.read_starts(), run.last_flags()
    except InputError as error:
        return str(error)
    flag_texts = flag_values([flags.flag_text(name, getattr(config, name)) for name in _REPLAYED_FLAGS])
    counts: dict[str, Any] = {"worker": strategy.replicas, "server": strategy.remote.servers.count}
    run_counts: dict[str, Any] = {"worker": starts[-1].get("replicas"), "server": len(updates[-1].versions)}
    steps = config.steps or steps_in_epochs(config.epochs, session.data.train.size, config.batch_size)
    differences = [
        *(f"--{name}={saved_flags[name]}" for name in _REPLAYED_FLAGS if saved_flags.get(name) != flag_texts[name]),
        *(count_of(run_counts[name], name) for name in counts if run_counts[name] != counts[name]),
        *([count_of(len(updates), "update")] if updates[-1].version + 1 < steps else []),
    ]
    if not differences:
        return ""
    return (
        "A replay must have the model, data, batch size, seed, workers and servers of the run that it repeats, and at most its "
        f"steps. Received: {run.path}, which has {differences[0]}. Use the same value in this run."
    )


def _begin(
    session: Session, config: TrainConfig, early_origin: resume.Origin, trainer: Trainer, stack: contextlib.ExitStack
) -> tuple[Checkpoints, NullLedger]:
    """Locks the directory, restores the trainer's state and records this attempt; every process must call it.

    Returns:
      The options for checkpoints, and the ledger of the examples that this process uses.
    """
    strategy, directory = session.strategy, RunDirectory(path_of(config.output_dir))
    if strategy.is_chief:
        directory.make()
        with contextlib.ExitStack() as lock_stack:
            _lock_directory(directory, lock_stack)
            remove_remnants(directory.checkpoints)
            if has_owner := bool(_lock_owner(directory)):
                stack.enter_context(lock_stack.pop_all())
        if not has_owner:  # a partial checkpoint had filled the disk
            _lock_directory(directory, stack)
    origin = _confirm_origin(config, directory, early_origin, strategy)
    if strategy.is_chief and resume.overwrites(directory, dataclasses.asdict(config), resume.restarted_job()):
        directory.clear()
        _log.info("Deleted the run that was in %s. To resume the new run, remove --overwrite.", directory.path)
    config = replace_fields(config, overwrite=False)  # a repeated or resumed run deletes nothing
    _restore(trainer, origin, config, directory)
    checkpoint = trainer.train_state.resumed_from
    commits = _commit_folder(config, directory, checkpoint, origin.continues_run, strategy)
    ledgers = strategy.ledger_count if _is_saved(config) else 0
    start = _record_start(trainer, session.data.train.size, config, directory, ledgers=ledgers, commits=commits)
    if commits:
        in_memory.remove_other_attempts(path_of(checkpoint), Path(commits))
    checkpoints = Checkpoints(
        directory=str(directory.checkpoints),
        every=config.checkpoint_every,
        keep=config.keep,
        best=config.best,
        in_background=config.checkpoint_async,
        strict=config.checkpoint_strict,
        flags=dataclasses.asdict(config),
        commit_every=config.commit_every,
        commit_directory=commits,
    )
    rank = strategy.cluster.rank
    ledger = LedgerFile(directory.ledger(start, rank)) if rank < ledgers else NullLedger()
    if strategy.is_chief and strategy.remote and strategy.remote.whole_batches:
        ledger = UpdatesFile(directory.updates(start), ledger)
    stack.callback(ledger.close)
    return checkpoints, ledger


def _is_saved(config: TrainConfig) -> bool:
    return any(config.parsed.checkpoint_every) or config.commit_every > 0 or bool(config.best)


def _lock_directory(directory: RunDirectory, stack: contextlib.ExitStack) -> None:
    """Locks the directory; if files cannot be locked, only writes the lock file, which identifies the directory."""
    try:
        stack.enter_context(lock(directory.path))
    except LockError as error:
        owner = one_line(_lock_owner(directory))
        stack.enter_context(lock(directory.path, exclusive=False))
        _log.warning(
            "%s The run continues without a lock, so another run could write to the directory. %s",
            error,
            f"The last run was {owner}: make sure that it has ended." if owner else "No other run is known.",
        )


def _lock_owner(directory: RunDirectory) -> str:
    try:
        return storage_of(directory.path).read(directory.path / "lock").decode(errors="replace")
    except OSError as error:
        return f"none: {error.strerror}"


def _confirm_origin(
    config: TrainConfig, directory: RunDirectory, early_origin: resume.Origin, strategy: Strategy
) -> resume.Origin:
    """Decides on the origin again: another run may have started or ended in the directory while the model was built."""
    commits, complete_commits = _last_commits(config, directory, strategy)
    decision = None
    if strategy.is_chief:
        arguments = config.resume, directory, dataclasses.asdict(config), resume.restarted_job()
        decision = resume.origin(*arguments, complete_commits)
        if resume.finished_message(*arguments) or (decision.continues_run and not early_origin.continues_run):
            directory.check(directory.path)
    with long_timeout(_SLOW_DISK) as deadline:
        origin = resume.Origin(*strategy.group.broadcast("origin/locked", decision, deadline))
    if commits:  # replaces rank 0's paths of in-memory checkpoints with those on this host
        paths = [path_of(path) for path in origin.checkpoints]
        local_paths = [str(commits / path.name if path.parent.name == commits.name else path) for path in paths]
        origin = origin._replace(checkpoints=local_paths)
    _check_shared(origin, config, directory, strategy)
    return _drop_invisible(origin, directory, strategy)


def _last_commits(
    config: TrainConfig, directory: RunDirectory, strategy: Strategy
) -> tuple[Path | None, list[str] | None]:
    """Returns this host's directory of the last attempt's in-memory checkpoints, if any, and the complete ones among them."""
    local_path = resume.commit_folder(directory, config.commit_dir) if strategy.is_chief else None
    if local_path:
        remove_remnants(local_path)
    with long_timeout(_SLOW_DISK) as deadline:
        shared_path = strategy.group.broadcast("commits/last", str(local_path or ""), deadline)
    if not shared_path:
        return None, None
    folder = in_memory.local_path(Path(shared_path), config.commit_dir)
    has_directory = strategy.group.gather("commits/place", bool(in_memory.parent_directory(config.commit_dir)))
    return folder, replicate_newest_checkpoint(strategy, folder) if all(has_directory) else None


def _check_shared(origin: resume.Origin, config: TrainConfig, directory: RunDirectory, strategy: Strategy) -> None:
    """Checks that all processes share the directory, identified by rank 0's lock, to read and write checkpoints.

    A run without checkpoints only logs a warning: it needs a shared directory only if it is preempted.
    """
    expected, *other_owners = strategy.group.gather("output_dir/seen", _lock_owner(directory))
    # If rank 0 cannot write, its lock file may be empty, like one that an earlier run left in another directory.
    ranks = ", ".join(str(rank) for rank, owner in enumerate(other_owners, 1) if owner != expected or not expected)
    reason = (
        f"which is a different directory on rank {ranks}"
        if expected
        else "where rank 0 cannot write the file `lock`, by which processes recognize a shared directory"
    )
    location = f"{json.dumps(str(directory.path))}, {reason}"
    if ranks and (_is_saved(config) or origin.checkpoints):
        raise InputError(
            f"Checkpoints need an output directory that all processes share. Received: {location}. Pass another --output_dir."
        )
    if ranks and strategy.is_chief:
        _log.warning(
            "This run cannot be saved on preemption, and would end with code 1. Saving needs an output directory "
            "that all processes share. Received: %s. Pass another --output_dir.",
            location,
        )


def _drop_invisible(origin: resume.Origin, directory: RunDirectory, strategy: Strategy) -> resume.Origin:
    """Drops in-memory checkpoints that are not visible to all processes, unless there are no others."""
    visibility = strategy.group.gather(
        "origin/seen", [storage_of(path).is_directory(path_of(path)) for path in origin.checkpoints]
    )
    is_visible = dict(zip(origin.checkpoints, map(all, zip(*visibility, strict=True)), strict=True))
    paths = [path for path in is_visible if is_visible[path] or path_of(path).parent == directory.checkpoints]
    if len(paths) < len(is_visible) and paths and strategy.is_chief:
        _log.warning(
            "Not all processes see %s; using the newest checkpoint that all of them see.",
            min(is_visible.keys() - paths),
        )
    return origin._replace(checkpoints=paths or origin.checkpoints)


def _restore(trainer: Trainer, origin: resume.Origin, config: TrainConfig, directory: RunDirectory) -> None:
    """Restores the trainer's state, except for a learning rate that was changed on the command line."""
    rate = keras_internals.constant_learning_rate(trainer.model.optimizer)
    is_own_run = any(resume.belongs_to_run(path_of(path), directory) for path in origin.checkpoints)
    trainer.resume_from(origin.checkpoints, rename_damaged=is_own_run)
    if trainer.train_state.resumed_from and rate is not None:
        saved_flags = Checkpoint.open(trainer.train_state.resumed_from).flags
        if any(saved_flags.get(name) != getattr(config, name) for name in _LEARNING_RATE_FLAGS):
            trainer.model.optimizer.learning_rate = rate


def _commit_folder(
    config: TrainConfig, directory: RunDirectory, checkpoint: str, continues_run: bool, strategy: Strategy
) -> str:
    """Creates this attempt's directory for in-memory checkpoints, and links the checkpoint it resumes from; "" for none."""
    parent = in_memory.required_parent(config.commit_every, config.commit_dir)
    if not parent:
        return ""
    name = strategy.group.broadcast("commits", in_memory.unique_name(directory.path) if strategy.is_chief else None)
    folder = Path(parent).absolute() / name
    try:
        host_ranks = ranks_by_directory(strategy.group, folder)
        if len(host_ranks) > 1:
            check_can_transfer(strategy)
    except InputError as error:
        if not continues_run:
            raise
        if strategy.is_chief:  # an elastic job must not end because of its new size
            _log.warning("In-memory checkpoints are disabled until the next restart. %s", error)
        return ""
    if checkpoint and strategy.cluster.rank in (host[0] for host in host_ranks):
        in_memory.link_checkpoint(path_of(checkpoint), folder)
    return str(folder)


def _record_start(
    trainer: Trainer, examples: int, config: TrainConfig, directory: RunDirectory, *, ledgers: int, commits: str
) -> int:
    """Records this attempt in the directory, on the chief; returns its index."""
    strategy, state, step = trainer.strategy, trainer.train_state, trainer.step
    host_names = open_strategy.host_names(strategy)
    batch_schedule = trainer.batch_schedule(examples, batch_size=config.batch_size, elastic_batch=config.elastic_batch)
    start = 0
    if strategy.is_chief:
        start = directory.begin(
            flags.flags_text(config),
            host_names,
            communication=strategy.communication,
            step=step,
            checkpoint=state.resumed_from,
            # The evaluation at the end of a run is not part of its state, unless an epoch or a period ends there.
            is_evaluated=step % config.eval_every == 0 if config.eval_every else not state.progress.epoch,
            facts={
                "strategy": strategy.name,
                "replicas": strategy.replicas,
                "servers": strategy.remote.servers.count if strategy.remote else 0,
                "batch_size": batch_schedule.position.batch_size,
                "examples_before": batch_schedule.position.examples_before(step),
                "examples": examples,
                "ledgers": ledgers,
                "commits": commits,
                "trains_clients": config.parsed.sync.trains_clients,
                "job_name": os.environ.get(JOB_NAME_VARIABLE, ""),
            },
        )
    with long_timeout(_SLOW_DISK) as deadline:
        return strategy.group.broadcast("output_dir/made", start, deadline)


# The run with its records, and its end


class Run(NamedTuple):
    """A run whose state has been restored and whose directory is open."""

    directory: RunDirectory
    is_chief: bool  # whether this process writes files other than its own log and ledger
    checkpoints: Checkpoints  # options for saving the run
    reporting: Reporting  # destinations of its records
    start_time: float  # `time.monotonic()` when it was ready to train

    def finish(
        self, trainer: Trainer, config: TrainConfig, callbacks: Sequence[keras.callbacks.Callback]
    ) -> BestValue | None:
        """Writes the trained model, and records that the run has finished; every process must call it.

        Returns:
          The best value, if the model of its step was written; else None.
        """
        reasons = (
            getattr(callback, "reason", "") for callback in callbacks
        )  # a user's callback may have an attribute `reason` of another type
        reason = next((reason for reason in reasons if reason and isinstance(reason, str)), "")
        step, best = trainer.step, trainer.load_best() if trainer.best else None
        with reraise_as_write_error(self.directory.model):
            trainer.save(self.directory.model)
        if self.is_chief:
            options = {name: getattr(config, name) for name in ("steps", "epochs", *resume.END_FLAGS)}
            with reraise_as_write_error(self.directory.end):
                self.directory.finish({"step": step, "model_step": trainer.step, "reason": reason, **options})
        return best

    def print_summary(self, best: BestValue | None, config: TrainConfig) -> None:
        """Prints the results, the next commands, and the directory on the chief."""
        if self.is_chief:
            flags = ["--checkpoint=best"] if best else []
            ignored = {"strategy", *field_names(config, "training_only"), *field_names(config, "is_option")}
            flags += [] if ignored.issuperset(unsafe_fields(config)) else ["--safe_mode=false"]
            print(*summary(self, self.directory.records(), best, " ".join(flags)), sep="\n", flush=True)


@contextmanager
def open_run(
    session: Session,
    config: TrainConfig,
    origin: resume.Origin,
    trainer: Trainer,
    findings: Sequence[tuple[str, str]],
    loading_seconds: float,
) -> Iterator[Run]:
    """Locks the directory of a run, restores its state, and records this attempt; every process must enter the context.

    Raises:
      InputError: a checkpoint is of another model, its batch cannot be divided between the current replicas, another
        process writes to the directory, or it cannot be written.
    """
    strategy, rank = session.strategy, session.strategy.cluster.rank
    directory = RunDirectory(path_of(config.output_dir))
    with contextlib.ExitStack() as stack:
        checkpoints, ledger = _begin(session, config, origin, trainer, stack)
        resumed_from = trainer.train_state.resumed_from
        stack.enter_context(python_logging.setup(rank, directory.log(rank)))
        _log.info("%s", session.strategy_choice.reason, extra=python_logging.ONLY_IN_FILE)
        if resumed_from:
            _log.info("Resuming from %s.", resumed_from, extra=python_logging.ONLY_IN_FILE)
        # A terminal has already shown this as a status.
        log_options = python_logging.ONLY_IN_FILE if can_overwrite(sys.stderr) else {}
        _log.info("Loading TensorFlow took %.1f s.", loading_seconds, extra=log_options)
        warn_about_flags(config, strategy, trainer.model)
        reporter, profile = Reporter(), NullProfile(config.profile_steps)
        if strategy.is_chief:
            _warn_of_lost_progress(resumed_from, config, directory)
            loggers = make_loggers(config.parsed.loggers, LoggedRun(directory, dataclasses.asdict(config)))
            reporter = chief_reporter(directory, sys.stderr, directory.records(), loggers)
            if config.profile_steps:
                profile = ProfileWindow(config.profile_steps, directory.tensorboard)
        reporting = Reporting(
            reporter=reporter,
            profile=profile,
            ledger=ledger,
            strategy_reason=session.strategy_choice.cause,
            record_all_reduce_table=lambda table: directory.write(directory.all_reduce_table, table.encode()),
            record_timelines=lambda timelines: directory.write(directory.timeline, png(timeline.draw(timelines))),
            description={"output": str(directory.path), "resuming": f"from {resumed_from}" if resumed_from else ""},
            findings=findings,
        )
        with _close_reporter(reporting.reporter):
            yield Run(directory, strategy.is_chief, checkpoints, reporting, time.monotonic())


def _warn_of_lost_progress(resumed_from: str, config: TrainConfig, directory: RunDirectory) -> None:
    if config.commit_every and not config.commit_dir and not any(config.parsed.checkpoint_every):
        _log.warning(
            "Without --commit_dir, in-memory checkpoints are kept by the launcher and are lost when it exits. "
            "Received: --commit_every=%d with --checkpoint_every=0. Add --checkpoint_every or --commit_dir.",
            config.commit_every,
        )
    *earlier_starts, _ = directory.read_starts()
    if earlier_starts and not resumed_from and directory.has_trained:
        _log.warning(
            "No checkpoint of this run's %s exists, so the run starts at step 0 with new weights%s. To avoid this, set or "
            "lower --checkpoint_every, or set --commit_dir.",
            "earlier attempt" if len(earlier_starts) == 1 else f"{len(earlier_starts)} earlier attempts",
            f"; the old records are in {directory.dropped}" if directory.has_dropped else "",
        )


@contextmanager
def _close_reporter(reporter: Reporter) -> Iterator[None]:
    """Closes the reporter with the outcome of the run, so that it writes the remaining files; the command prints errors."""
    result, is_reported = "done", False
    try:
        yield
    except BaseException as error:
        result, is_reported = describe_error(error), isinstance(error, WriteError)
        raise
    finally:
        try:
            reporter.close(result)
        except WriteError as error:  # only a warning, because the outcome is known
            if not is_reported:
                _log.warning("%s", error)


def summary(run: Run, records: Sequence[Mapping[str, Any]], best: BestValue | None, flags: str = "") -> list[str]:
    """Returns the lines of the summary of a run that has ended; the last one is the directory.

    `best` is the best value, if the model of its step was written; `flags` are those with which other commands use
    the same model, such as `--checkpoint=best`.
    """
    directory, last = run.directory, records[-1]
    metrics = main_metrics(last)
    names = [name for name in metrics if "accuracy" in name] or [*metrics]
    numbers = "  ".join(f"{name} {float(last[name]):.4f}" for name in ("loss", *names) if name in last)
    value = f"{best}, exported as {directory.model.name}" if best else _best(records)
    duration_text = f"trained to step {last['step']} in {duration(time.monotonic() - run.start_time)}"
    arguments = " ".join(filter(None, [shlex.quote(str(directory.path)), flags]))
    can_resume = bool(run.checkpoints.best or any(run.checkpoints.interval))
    return [
        f"{last['kind']} after {last['step']} steps: {numbers}",
        f"best {value}; {duration_text}" if value else duration_text,
        f"next: tfdist evaluate {arguments}, or tfdist predict, or tfdist export",
        *["or train longer: the same command with more --epochs or --steps"] * can_resume,
        f"{directory.model.name}, {directory.curves.name}, {directory.metrics.name} and {directory.logs.name} are in",
        str(directory.path),
    ]


def _best(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the best value of the first metric, or of the loss without metrics; "" if there was only one evaluation."""
    evaluations = [record for record in records if record["kind"] == EVAL]
    if len(evaluations) < 2:
        return ""
    metric = next(iter(main_metrics(evaluations[-1])), "loss")
    best = best_evaluation(evaluations, metric)
    return f"{metric} {best[1]:.4f} at step {best[0]}" if best else ""


# The output of `--dry_run`: the flags of a run, and the division of its batch and steps


def describe(session: Session, trainer: Trainer, output: Output) -> None:
    """Prints a description of a run on the chief; every process must call it. The trainer must be built."""
    config, strategy = session.config, session.strategy
    host_names = open_strategy.host_names(strategy)
    if not strategy.is_chief:
        return
    size = session.data.train.size
    trainer.batch_schedule(size, batch_size=config.batch_size, elastic_batch=config.elastic_batch)
    parts = strategy.batch_parts
    micro_steps = strategy.micro_batches or config.accumulate_steps
    weights = config.parsed.balance.weights
    equal_counts = [row_range(config.batch_size, part, parts)[1] for part in range(parts)]
    replica_rows = apportion(config.batch_size, weights) if weights else equal_counts
    steps = config.steps or steps_in_epochs(config.epochs, size, config.batch_size)
    result: dict[str, Any] = {
        "flags": dataclasses.asdict(config),
        "strategy": config.strategy,
        "reason": session.strategy_choice.reason,
        "processes": strategy.cluster.size,
        "hosts": host_names,
        "replicas": parts,
        "global_batch_examples": config.batch_size,
        "replica_batch_examples": sorted(set(replica_rows)),
        "micro_batch_examples": _micro_step_sizes(replica_rows, micro_steps),
        "micro_steps_per_step": micro_steps,
        "training_examples": size,
        "test_examples": session.data.test.size if session.data.test else None,
        "steps": steps,
        "epochs": steps * config.batch_size / size,
        "parameters": trainer.model.count_params(),
    }
    text = {
        "strategy": result["reason"],
        "processes": f"{result['processes']} on {', '.join(dict.fromkeys(host_names))}",
        "replicas": parts,
        "global batch": f"{config.batch_size} examples",
        "per replica": f"{_join_with_or(result['replica_batch_examples'])} examples",
        "per micro-step": f"{_join_with_or(result['micro_batch_examples'])} examples, {micro_steps} per step",
        "training set": f"{size} examples",
        "test set": f"{session.data.test.size} examples" if session.data.test else "none",
        "steps": f"{steps} ({result['epochs']:.2f} epochs)",
        "parameters": f"{result['parameters']:,}",
    }
    output.line(flags.flags_text(config).removesuffix("\n"))
    for name, value in text.items():
        output.line(f"{name:>15}: {value}")
    output.result(result)


def _micro_step_sizes(counts: Sequence[int], micro_steps: int) -> list[int]:
    """Returns the distinct numbers of examples in a micro-step of any replica, in ascending order."""
    parts = [row_range(count, part, micro_steps)[1] for count in counts for part in range(min(micro_steps, count))]
    return sorted(set(parts))


def _join_with_or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
