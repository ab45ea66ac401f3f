"""Prepares the state and directory of a run: new or resumed, with a lock against other writers."""

import contextlib
import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import NamedTuple

from tfdist import keras_internals
from tfdist.checkpoint import in_memory
from tfdist.checkpoint.format import Checkpoint, Holder, NoLock, clean_partial, lock, unlocked
from tfdist.checkpoint.manager import Checkpoints
from tfdist.checkpoint.replication import hosts, share
from tfdist.checkpoint.transfer import check_can_transfer
from tfdist.cli import flags, open_strategy, resume
from tfdist.cli.resume import Origin, commit_folder, is_own, relaunched
from tfdist.cli.resume import origin as decided
from tfdist.config.fields import replaced
from tfdist.config.train_config import TrainConfig
from tfdist.coordination.timeouts import long_timeout
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.errors.engine_errors import one_line
from tfdist.launcher.attempt import LAUNCHED_VARIABLE
from tfdist.reporting import LedgerFile, NullLedger, RunDirectory
from tfdist.storage import path_of, storage_of
from tfdist.trainer.trainer import Trainer

_DELAYED_BY = "a slow disk"  # what may delay rank 0 while the others wait
_log = logging.getLogger(__name__)

_RATE = ("learning_rate", "lr_scaling", "base_batch_size")


class Begun(NamedTuple):
    """A run whose state has been restored and whose directory is ready.

    Attributes:
      checkpoints: how the run is saved.
      ledger: records the examples that this process uses.
    """

    checkpoints: Checkpoints
    ledger: LedgerFile | NullLedger


def origin(config: TrainConfig, directory: RunDirectory, strategy: Strategy) -> Origin:
    """Returns what the run begins with, the same on every process, without writing anything.

    Raises:
      InputError: see `tfdist.cli.resume.origin`; on the chief.
    """
    found = _decided(config, directory) if strategy.is_chief else None
    with long_timeout(_DELAYED_BY) as deadline:
        return Origin(*strategy.group.broadcast("origin", found, deadline))


def _last_commits(
    config: TrainConfig, directory: RunDirectory, strategy: Strategy
) -> tuple[Path | None, list[str] | None]:
    """Returns this host's directory of the last start's in-memory checkpoints, if any, and the result of `share`."""
    recorded = commit_folder(directory, config.commit_dir) if strategy.is_chief else None
    if recorded:
        clean_partial(recorded)
    with long_timeout(_DELAYED_BY) as deadline:
        said = strategy.group.broadcast("commits/last", str(recorded or ""), deadline)
    if not said:
        return None, None
    folder = in_memory.local_path(Path(said), config.commit_dir)
    can_have_it = strategy.group.gather("commits/place", bool(in_memory.place(config.commit_dir)))
    return folder, share(strategy, folder) if all(can_have_it) else None


def _decided(config: TrainConfig, directory: RunDirectory, whole: list[str] | None = None) -> Origin:
    return decided(config.resume, directory, dataclasses.asdict(config), relaunched(), whole)


def finished(config: TrainConfig, directory: RunDirectory, strategy: Strategy) -> str:
    """Returns what to say about a run that has nothing left to do, the same on every process; else ""."""
    mine = (
        resume.finished(config.resume, directory, dataclasses.asdict(config), relaunched()) if strategy.is_chief else ""
    )
    with long_timeout(_DELAYED_BY) as deadline:
        return strategy.group.broadcast("origin/finished", mine, deadline)


def begin(
    origin: Origin,
    trainer: Trainer,
    examples: int,
    config: TrainConfig,
    directory: RunDirectory,
    stack: contextlib.ExitStack,
) -> Begun:
    """Restores the trainer's state and prepares the directory; every process must call it.

    Args:
      origin: what to begin with.
      trainer: a built trainer.
      examples: number of examples per epoch.
      config: configuration of the run.
      directory: directory of the run.
      stack: keeps the directory locked, and its files open, until it is closed.

    Raises:
      InputError: a checkpoint is of another model, its batch cannot be divided between the current replicas, another
        process writes to the directory, or it cannot be written.
    """
    strategy = trainer.strategy
    if strategy.is_chief:
        directory.make()
        holder = _locked(directory, stack)
        clean_partial(directory.checkpoints)
        holder.write_owner()  # the disk may have been full before the cleanup
    origin = _agreed_under_lock(origin, config, directory, strategy)
    if strategy.is_chief and resume.overwrites(directory, dataclasses.asdict(config), relaunched()):
        directory.clear()
        _log.info("Deleted the run that was in %s. To resume this one, leave out --overwrite.", directory.path)
    config = replaced(config, overwrite=False)  # what repeats the run, or resumes it, deletes nothing
    step = _resumed(trainer, origin, config, directory)
    checkpoint = trainer.train_state.resumed_from
    folder = _commit_folder(config, directory, checkpoint, origin.continues_run, strategy)
    start = _recorded(trainer, step, examples, config, directory, folder)
    if folder:
        in_memory.remove_former(path_of(checkpoint), Path(folder))
    return Begun(_checkpoints(config, directory, folder), _ledger(start, config, directory, strategy, stack))


def _recorded(
    trainer: Trainer, step: int, examples: int, config: TrainConfig, directory: RunDirectory, commits: str
) -> int:
    """Writes what is known about this start to the directory, on the chief; returns the start's number.

    Args:
      trainer: a trainer whose state has been restored.
      step: its step.
      examples: number of examples per epoch.
      config: configuration of the run.
      directory: directory of the run.
      commits: directory of in-memory checkpoints; "" if there is none.
    """
    strategy, state = trainer.strategy, trainer.train_state
    names = open_strategy.hosts(strategy)
    batch_schedule = trainer.batch_schedule(examples, batch_size=config.batch_size, elastic_batch=config.elastic_batch)
    start = 0
    if strategy.is_chief:
        start = directory.begin(
            flags.flags_text(config),
            names,
            communication=strategy.communication,
            step=step,
            checkpoint=state.resumed_from,
            # The evaluation at the end of a run is not part of its state, unless an epoch or a period ends there.
            evaluated=step % config.eval_every == 0 if config.eval_every else not state.progress.epoch,
            facts={
                "strategy": strategy.name,
                "replicas": strategy.replicas,
                "batch_size": batch_schedule.position.batch_size,
                "examples_before": batch_schedule.position.before(step),
                "examples": examples,
                "ledgers": _ledgers(config, strategy),
                "commits": commits,
                "trains_clients": config.parsed.sync.trains_clients,
                "launched": os.environ.get(LAUNCHED_VARIABLE, ""),
            },
        )
    with long_timeout(_DELAYED_BY) as deadline:
        return strategy.group.broadcast("output_dir/made", start, deadline)


def _checkpoints(config: TrainConfig, directory: RunDirectory, commits: str) -> Checkpoints:
    return Checkpoints(
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


def _ledger(
    start: int, config: TrainConfig, directory: RunDirectory, strategy: Strategy, stack: contextlib.ExitStack
) -> LedgerFile | NullLedger:
    """Returns what records the examples that this process uses; the stack closes it."""
    rank = strategy.cluster.rank
    ledger = LedgerFile(directory.ledger(start, rank)) if rank < _ledgers(config, strategy) else NullLedger()
    stack.callback(ledger.close)
    return ledger


def _locked(directory: RunDirectory, stack: contextlib.ExitStack) -> Holder:
    """Locks the directory, or only writes the lock file, which identifies the directory, if files cannot be locked."""
    try:
        return stack.enter_context(lock(directory.path))
    except NoLock as error:
        last = one_line(_lock_of(directory))
        holder = stack.enter_context(unlocked(directory.path))
        _log.warning(
            "%s The run continues without a lock, so another run could write there. %s",
            error,
            f"The last run was {last}: make sure that it has ended." if last else "No other run is known.",
        )
        return holder


def _agreed_under_lock(origin: Origin, config: TrainConfig, directory: RunDirectory, strategy: Strategy) -> Origin:
    """Decides again what to begin with: another process may have ended while the model was built."""
    last, whole = _last_commits(config, directory, strategy)
    found = _under_lock(origin, config, directory, whole) if strategy.is_chief else None
    with long_timeout(_DELAYED_BY) as deadline:
        origin = _here(Origin(*strategy.group.broadcast("origin/locked", found, deadline)), last)
    _check_shared(origin, config, directory, strategy)
    return _seen_by_all(origin, directory, strategy)


def _under_lock(origin: Origin, config: TrainConfig, directory: RunDirectory, whole: list[str] | None) -> Origin:
    """Decides again what to begin with; raises `InputError` if another run has begun here meanwhile."""
    found = _decided(config, directory, whole)
    is_finished = resume.finished(config.resume, directory, dataclasses.asdict(config), relaunched())
    if is_finished or (found.continues_run and not origin.continues_run):
        directory.check(directory.path)
    return found


def _here(origin: Origin, folder: Path | None) -> Origin:
    """Replaces rank 0's paths of in-memory checkpoints by their paths on this host."""
    paths = [path_of(path) for path in origin.checkpoints]
    here = [folder / path.name if folder and path.parent.name == folder.name else path for path in paths]
    return origin._replace(checkpoints=[str(path) for path in here])


def _resumed(trainer: Trainer, origin: Origin, config: TrainConfig, directory: RunDirectory) -> int:
    """Restores the trainer's state, except a learning rate changed on the command line; returns the step."""
    rate = keras_internals.constant_learning_rate(trainer.model.optimizer)
    own = any(is_own(path_of(path), directory) for path in origin.checkpoints)
    step = trainer.resume_from(origin.checkpoints, sets_aside=own)
    if trainer.train_state.resumed_from and rate is not None:
        saved = Checkpoint.open(trainer.train_state.resumed_from).flags
        if any(saved.get(name) != getattr(config, name) for name in _RATE):
            trainer.model.optimizer.learning_rate = rate
    return step


def _is_saved(config: TrainConfig) -> bool:
    return any(config.parsed.checkpoint_every) or config.commit_every > 0 or bool(config.best)


def _ledgers(config: TrainConfig, strategy: Strategy) -> int:
    """Returns how many processes record a ledger: those whose replicas are their own, as each of others has all examples."""
    if not _is_saved(config):
        return 0
    return strategy.replicas // len(strategy.local_replicas)


def _check_shared(origin: Origin, config: TrainConfig, directory: RunDirectory, strategy: Strategy) -> None:
    """Checks that all processes see the same directory, identified by rank 0's lock, to read and write checkpoints.

    A run without checkpoints needs this only if it is preempted, so it just gets a warning.
    """
    text, *others = strategy.group.gather("output_dir/seen", _lock_of(directory))
    # If rank 0 cannot write, its file is as empty as one that an earlier run has left elsewhere.
    ranks = ", ".join(str(rank) for rank, other in enumerate(others, 1) if other != text or not text)
    why = (
        f"which is a different directory on rank {ranks}"
        if text
        else "where rank 0 cannot write `lock`, which shows whether they do"
    )
    received = f"{json.dumps(str(directory.path))}, {why}"
    if ranks and (_is_saved(config) or origin.checkpoints):
        raise InputError(
            f"Checkpoints need an output directory that all processes share. Received: {received}. Give another --output_dir."
        )
    if ranks and strategy.is_chief:
        _log.warning(
            "This run cannot be saved on preemption, and would end with code 1. Saving needs an output directory "
            "that all processes share. Received: %s. Give another --output_dir.",
            received,
        )


def _seen_by_all(origin: Origin, directory: RunDirectory, strategy: Strategy) -> Origin:
    """Drops in-memory checkpoints that not all processes see, unless nothing else is left."""
    everyone = strategy.group.gather(
        "origin/seen", [storage_of(path).is_directory(path_of(path)) for path in origin.checkpoints]
    )
    seen = dict(zip(origin.checkpoints, map(all, zip(*everyone, strict=True)), strict=True))
    kept = [path for path in seen if seen[path] or path_of(path).parent == directory.checkpoints]
    if len(kept) < len(seen) and kept and strategy.is_chief:
        _log.warning(
            "Not all processes see %s; using the newest checkpoint that all of them see.", min(seen.keys() - kept)
        )
    return origin._replace(checkpoints=kept or origin.checkpoints)


def _commit_folder(
    config: TrainConfig, directory: RunDirectory, checkpoint: str, continues_run: bool, strategy: Strategy
) -> str:
    """Creates this start's directory of in-memory checkpoints, with the one it resumes from; "" if it makes none."""
    home = in_memory.home(config.commit_every, config.commit_dir)
    if not home:
        return ""
    name = strategy.group.broadcast("commits", in_memory.new_name(directory.path) if strategy.is_chief else None)
    folder = Path(home).absolute() / name
    try:
        those = hosts(strategy.group, folder)
        if len(those) > 1:
            check_can_transfer(strategy)
    except InputError as error:
        if not continues_run:
            raise
        if strategy.is_chief:  # the new size of an elastic job must not end it
            _log.warning("This start writes no commits. %s", error)
        return ""
    if checkpoint and strategy.cluster.rank in (host[0] for host in those):
        in_memory.take_along(path_of(checkpoint), folder)
    return str(folder)


def _lock_of(directory: RunDirectory) -> str:
    try:
        return storage_of(directory.path).read(directory.path / "lock").decode(errors="replace")
    except OSError as error:
        return f"none: {error.strerror}"
