"""Restores the state of a run from the newest valid checkpoint, which is the same on all processes."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from tfdist.checkpoint.best import parse_best_value
from tfdist.checkpoint.format import (
    Checkpoint,
    CheckpointError,
    CorruptCheckpointError,
    checkpoints_at,
    complete_checkpoints,
    damaged_checkpoints,
    mark_damaged,
    newest_first,
)
from tfdist.checkpoint.replication import replicate_newest_checkpoint
from tfdist.checkpoint.run_variables import RunVariables
from tfdist.config.rules import parse_rules
from tfdist.coordination import Group
from tfdist.coordination.group import LONG_SECONDS, long_timeout
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.distribution.strategy import Strategy
from tfdist.step.running_metrics import Progress
from tfdist.storage import AnyPath, StoragePath, path_of

_log = logging.getLogger(__name__)


def resume_candidates(strategy: Strategy, path: AnyPath, commits: str | os.PathLike[str] = "") -> list[str]:
    """Returns rank 0's durable checkpoints at a path, and the in-memory checkpoints in `commits`, newest first.

    Every process must call this. It copies the newest in-memory checkpoint to each host.
    """
    group, folder = strategy.group, Path(commits).expanduser()
    local_checkpoints = [str(checkpoint) for checkpoint in checkpoints_at(path)]
    with long_timeout("its data or its model") as deadline:
        durable = [path_of(checkpoint) for checkpoint in group.broadcast("resume", local_checkpoints, deadline)]
    names: list[str] = []
    if commits:
        complete_names = replicate_newest_checkpoint(strategy, folder)
        folder_names = (
            [path.name for path in complete_checkpoints(folder)] if complete_names is None else complete_names
        )
        names = group.broadcast("resume/commits", folder_names)
    checkpoints = newest_first(durable, [folder / name for name in names])
    if not checkpoints:  # the run would silently start over if all of its checkpoints were damaged
        folders = [path_of(path), path_of(path) / "checkpoints", *([folder, folder / "checkpoints"] if commits else [])]
        local_names = [str(checkpoint) for checkpoint in damaged_checkpoints(*folders)]
        damaged_names = next(filter(None, group.gather("resume/damaged", local_names)), None)
        if damaged_names:
            raise CheckpointError(
                f"A run must resume from a valid checkpoint. Received: {folders[0]}, where all checkpoints are damaged; the "
                f"newest is {damaged_names[-1]}. Use another directory, and start with new weights or from a checkpoint of "
                "another run."
            )
    return [str(path) for path in checkpoints]


def restore(state: RunVariables, paths: Sequence[str], group: Group, rename_damaged: bool = True) -> Checkpoint | None:
    """Restores a run from the first valid checkpoint; every process must call this with the same paths.

    Logs a warning for each corrupted checkpoint; with `rename_damaged`, the chief also renames it. The chief verifies every
    byte: a checkpoint that only other processes cannot read does not count as corrupted.

    Returns:
      The checkpoint; None if there are no paths.

    Raises:
      InputError: a checkpoint belongs to a different model or optimizer, or was written by a newer version.
      CheckpointError: no checkpoint is valid, or a process other than the chief cannot read a valid checkpoint.
    """
    is_chief, damages = group.rank == 0, []
    state.collect()
    for index, path in enumerate(paths):
        checkpoint, damage = None, ""
        try:
            checkpoint = _restore(state, path_of(path))
            if is_chief:  # also verifies data that this run does not use
                checkpoint.verify()
        except CorruptCheckpointError as error:
            damage = str(error)
        errors = group.gather(f"checkpoint/read/{index}", damage, LONG_SECONDS)
        if not any(errors):
            return checkpoint
        if not errors[0]:
            rank = next(rank for rank, text in enumerate(errors) if text)
            raise CheckpointError(
                f"All processes must be able to read the checkpoint that a run resumes from. Received, on rank {rank}: "
                f"{errors[rank]} It is valid on rank 0, so its directory must be shared between the hosts."
            )
        damages.append(errors[0])
        if is_chief:
            suffix = ""
            if rename_damaged:
                try:
                    suffix = f" It was renamed to {mark_damaged(path)}."
                except OSError as error:
                    suffix = f" It could not be renamed ({error.strerror})."
            _log.warning("%s%s", damages[-1], suffix)
    if damages:
        raise CheckpointError(
            f"A run must resume from a valid checkpoint. Received: {len(damages)} damaged checkpoints. {damages[0]} Use "
            "another directory, and start with new weights or from a checkpoint of another run."
        )
    return None


def restore_weights(state: RunVariables, path: StoragePath, with_optimizer: bool) -> Checkpoint:
    """Restores the weights of a single process for an evaluation; unlike `restore`, reads only the data that it needs.

    `with_optimizer` also restores the optimizer's state, which contains the averaged weights of `--ema`.

    Raises:
      InputError: the checkpoint is of another model.
      CheckpointError: the checkpoint is damaged, or has been removed in the meantime.
    """
    state.collect()
    return _restore(state, path, with_optimizer)


def _check_values(checkpoint: Checkpoint) -> None:
    """Raises `CorruptCheckpointError` if values other than tensors are invalid; called before any value is restored."""
    try:
        batches = BatchSchedule.from_json(checkpoint.values["batch_schedule"])
        Progress(checkpoint.values["progress"])
        parse_best_value(checkpoint.values)
        if type(batches.begun_at) is not int:
            raise TypeError("begun_at")
        for name, kind in (("compression", dict), ("exchanges", dict), ("order", list)):
            if type(checkpoint.values[name]) is not kind:
                raise TypeError(name)
        for methods in checkpoint.values["compression"].values():
            parse_rules(methods)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CorruptCheckpointError(checkpoint.path, f"its run state cannot be read ({error})") from error


def _restore(state: RunVariables, path: StoragePath, with_optimizer: bool = True) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    _check_values(checkpoint)
    state.restore(checkpoint, with_optimizer)
    return checkpoint
