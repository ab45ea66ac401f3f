"""Restores the state of a run from the newest valid checkpoint, the same on all processes."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.checkpoint.best import best_of
from tfdist.checkpoint.format import (
    Checkpoint,
    CheckpointError,
    CorruptCheckpointError,
    checkpoints_at,
    newest,
    newest_first,
    set_aside,
    set_aside_in,
)
from tfdist.checkpoint.replication import share
from tfdist.checkpoint.run_variables import RunVariables
from tfdist.config.rules import parse_rules
from tfdist.coordination import Group
from tfdist.coordination.group import LONG_SECONDS, long_timeout
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.step.running_metrics import Progress
from tfdist.storage import AnyPath, StoragePath, path_of

_log = logging.getLogger(__name__)


def resume_candidates(strategy: Strategy, path: AnyPath, commits: str | os.PathLike[str] = "") -> list[str]:
    """Returns the checkpoints at a path, and the in-memory ones in a directory of each host, the newest first.

    Every process must call it; rank 0's checkpoints are used.
    """
    group, folder = strategy.group, Path(commits).expanduser()
    mine = [str(found) for found in checkpoints_at(path)]
    with long_timeout("its data or its model") as deadline:
        durable = [path_of(found) for found in group.broadcast("resume", mine, deadline)]
    names: list[str] = []
    if commits:
        whole = share(strategy, folder)
        there = [found.name for found in newest(folder)] if whole is None else whole
        names = group.broadcast("resume/commits", there)
    found = newest_first(durable, [folder / name for name in names])
    if not found:
        folders = [path_of(path), *([folder] if commits else [])]
        _check_none_was_damaged(group, folders)
    return [str(one) for one in found]


def _check_none_was_damaged(group: Group, folders: Sequence[StoragePath]) -> None:
    """Raises `CheckpointError` if the run would silently start over because all of its checkpoints were set aside."""
    damaged = [
        str(found) for found in set_aside_in(*(place for path in folders for place in (path, path / "checkpoints")))
    ]
    known = next(filter(None, group.gather("resume/damaged", damaged)), None)
    if known:
        raise CheckpointError(
            f"A run must resume from a valid checkpoint. Received: {folders[0]}, where all checkpoints are damaged; "
            f"the newest is {known[-1]}. Start in another directory, with new weights or from a checkpoint of another "
            "run."
        )


def restore(state: RunVariables, paths: Sequence[str], group: Group, sets_aside: bool = True) -> Checkpoint | None:
    """Restores a run from the first valid one of these checkpoints; every process must call it with the same paths.

    A warning is logged for each corrupted checkpoint; with `sets_aside` the chief also renames it, so that it is not
    used again. The chief verifies every byte: a checkpoint that only other processes cannot read is not considered
    corrupted.

    Returns:
      The checkpoint; None if there are no paths.

    Raises:
      InputError: a checkpoint is of another model or optimizer, or of a newer version.
      CheckpointError: none of them is valid, or a process other than the chief cannot read a valid one.
    """
    chief, damages = group.rank == 0, []
    state.collect()
    for number, path in enumerate(paths):
        checkpoint, damage = _restored(state, path_of(path), whole=chief)
        found = group.gather(f"checkpoint/read/{number}", damage, LONG_SECONDS)
        if not any(found):
            return checkpoint
        if not found[0]:
            rank = next(rank for rank, text in enumerate(found) if text)
            raise CheckpointError(
                "All processes must be able to read the checkpoint that a run resumes from. Received, on rank "
                f"{rank}: {found[rank]} "
                "It is valid on rank 0: share its directory between the hosts."
            )
        damages.append(found[0])
        if chief:
            _log.warning("%s%s", damages[-1], _set_aside(path_of(path)) if sets_aside else "")
    if damages:
        raise CheckpointError(
            f"A run must resume from a valid checkpoint. Received: {len(damages)} damaged. {damages[0]} Start in "
            "another directory, with new weights or from a checkpoint of another run."
        )
    return None


def _check_values(checkpoint: Checkpoint) -> None:
    """Raises `CorruptCheckpointError` if values that are not tensors are invalid, before anything is restored."""
    try:
        batches = BatchSchedule.from_json(checkpoint.values["batch_schedule"])
        Progress(checkpoint.values["progress"])
        best_of(checkpoint.values)
        if type(batches.begun_at) is not int:
            raise TypeError("begun_at")
        for name, kind in (("compression", dict), ("exchanges", dict), ("order", list)):
            if type(checkpoint.values[name]) is not kind:
                raise TypeError(name)
        _check_methods(checkpoint.values["compression"])
    except InputError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CorruptCheckpointError(checkpoint.path, f"its run state cannot be read ({error})") from error


def _check_methods(compression: Mapping[str, str]) -> None:
    for methods in compression.values():
        try:
            parse_rules(methods)
        except InputError as error:
            raise ValueError(str(error)) from error


def _set_aside(path: StoragePath) -> str:
    try:
        return f" It was renamed to {set_aside(path)}."
    except OSError as error:
        return f" It could not be renamed ({error.strerror})."


def _restored(state: RunVariables, path: StoragePath, whole: bool) -> tuple[Checkpoint | None, str]:
    """Restores a checkpoint; returns it, and an error if it is corrupted. `whole` verifies unneeded data, too."""
    try:
        checkpoint = Checkpoint.open(path)
        _check_values(checkpoint)
        state.restore(checkpoint)
        if whole:
            checkpoint.verify()
    except CorruptCheckpointError as damaged:
        return None, str(damaged)
    return checkpoint, ""
