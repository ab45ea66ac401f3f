"""Decides how a run begins: at step 0, or from a checkpoint of its own directory or of another run."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfdist.checkpoint import in_memory
from tfdist.checkpoint.format import (
    CorruptCheckpointError,
    checkpoints_at,
    first_readable,
    newest,
    newest_first,
    set_aside_in,
)
from tfdist.cli.early_checks import ProcessContext
from tfdist.config.conflicts import flag_text
from tfdist.config.fields import field_names
from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError
from tfdist.launcher.attempt import LAUNCHED_VARIABLE, RESTART_VARIABLE
from tfdist.reporting import RunDirectory
from tfdist.reporting.file_errors import must_enter
from tfdist.reporting.run_directory import flag_values
from tfdist.storage import StoragePath, path_of, storage_of

AUTO, NEVER = "auto", "never"
END_FLAGS = ("best", "early_stopping", "callbacks")  # flags on which the end of a run depends, besides its length
FIXED = field_names(TrainConfig, "fixed")  # with other values, the steps before and after would not belong together


class Origin(NamedTuple):
    """The checkpoints with which a run begins.

    Attributes:
      checkpoints: checkpoints to try, including in-memory ones, the newest first; empty for step 0.
      continues_run: whether its directory already contains this run.
    """

    checkpoints: list[str]
    continues_run: bool


@must_enter()
def origin(
    resume: str,
    directory: RunDirectory,
    flags: Mapping[str, Any],
    job_name: str = "",
    complete_commits: Sequence[str] | None = None,
) -> Origin:
    """Decides how a run begins; for the chief. Does not change any files.

    Args:
      resume: value of the flag.
      directory: directory of the run.
      flags: flags of the run, by name.
      job_name: name of the job if a launcher has restarted it; else empty. A run that the same job started,
        even partially, is its own.
      complete_commits: names of the last start's in-memory checkpoints that are complete; None for all.

    Raises:
      InputError: there is nothing to resume from where it was requested, or it belongs to another run; or the directory
        contains something else.
    """
    if overwrites(directory, flags, job_name):
        return _overwriting_origin(resume, directory, flags)
    is_own_run = _is_own_run(resume, directory, job_name)
    if not is_own_run:
        _check_new(directory)
        if resume in (AUTO, NEVER):
            return Origin([], False)
    checkpoints = (
        _own_checkpoints(directory, flags["commit_dir"], complete_commits) if is_own_run else checkpoints_at(resume)
    )
    if checkpoints:
        _check_flags(checkpoints, flags)
    elif not is_own_run:
        raise _nothing_to_resume(resume)
    elif directory.is_done or _began_with_others(directory, flags):
        _check_new(directory)  # fails if it is done, or of another run, and must not be overwritten
    return Origin([str(path) for path in checkpoints], is_own_run)


def decide(config: TrainConfig, directory: RunDirectory) -> tuple[str, Origin]:
    """Returns the message about a run that has finished, see `finished`, and the origin of the run, see `origin`."""
    arguments = config.resume, directory, dataclasses.asdict(config), restarted_job()
    message = finished(*arguments)
    return message, Origin([], True) if message else origin(*arguments)


def decide_early(config: TrainConfig, context: ProcessContext) -> tuple[str, Origin] | None:
    """Returns the result of `decide`, if there is one process and a directory; raises its errors and those of `path_of`."""
    for path in (config.output_dir, config.resume):
        path_of(path)
    if not config.output_dir or context.cluster.size > 1:
        return None
    return decide(config, RunDirectory(path_of(os.path.expanduser(config.output_dir))))


def overwrites(directory: RunDirectory, flags: Mapping[str, Any], job_name: str = "") -> bool:
    """Returns whether a directory has a run that is to be deleted; the arguments are as for `origin`."""
    return bool(flags.get("overwrite")) and directory.is_run and not _is_restart(directory, job_name)


@must_enter()
def finished(resume: str, directory: RunDirectory, flags: Mapping[str, Any], job_name: str = "") -> str:
    """Returns the message about a run that has finished and has nothing left to do, else ""; see `origin`."""
    if overwrites(directory, flags, job_name) or not _is_own_run(resume, directory, job_name):
        return ""
    end = directory.finished
    if not end or _began_with_others(directory, flags):
        return ""
    if any(end.get(name) != flags.get(name) for name in END_FLAGS):
        return ""
    reason, length = end.get("reason", ""), "steps" if flags.get("steps") else "epochs"
    if not reason and flags[length] > (end.get(length) or 0):
        return ""
    can_continue = not reason and newest(directory.checkpoints)
    remedy = f"A larger --{length} continues it; " if can_continue else ""
    return (
        f"This run has finished {f'by {reason}' if reason else 'at step ' + str(end['step'])}. Its model is "
        f"{directory.model}. {remedy}--overwrite starts over."
    )


def restarted_job(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the name of the job if a launcher has restarted it; else empty."""
    is_again = environment.get(RESTART_VARIABLE, "0") != "0"
    return environment.get(LAUNCHED_VARIABLE, "") if is_again else ""


def _is_restart(directory: RunDirectory, job_name: str) -> bool:
    return job_name != "" and _starts(directory)[-1].get("launched") == job_name


def _is_own_run(resume: str, directory: RunDirectory, job_name: str) -> bool:
    """Returns whether a directory has a run that the command continues."""
    if not directory.is_run:
        return False
    # The same command resumes a run that began with its flag.
    is_repeated = resume != NEVER and directory.last_flags().get("resume") == resume
    return _is_restart(directory, job_name) or resume == AUTO or is_repeated


def _nothing_to_resume(resume: str) -> InputError:
    return InputError(
        "--resume must be auto, never, or the directory of a checkpoint or of a run with checkpoints. Received: "
        f"{resume}. A run's checkpoints are in its directory `checkpoints`."
    )


def _overwriting_origin(resume: str, directory: RunDirectory, flags: Mapping[str, Any]) -> Origin:
    """Returns the origin of a run that replaces the one in its directory."""
    checkpoints = [] if resume in (AUTO, NEVER) else checkpoints_at(resume)
    if any(is_own(path, directory) for path in checkpoints):
        raise InputError(
            "A run cannot begin with a checkpoint that it deletes. Received: "
            f"--overwrite with --resume={resume}, which is in {directory.path}. Give another --output_dir."
        )
    if checkpoints:
        _check_flags(checkpoints, flags)
    elif resume not in (AUTO, NEVER):
        raise _nothing_to_resume(resume)
    return Origin([str(path) for path in checkpoints], False)


def _check_new(directory: RunDirectory) -> None:
    """Raises `InputError` if a directory is not empty, or cannot be written."""
    try:
        directory.check(directory.path)
    except InputError as error:
        if not directory.is_run:
            raise
        raise InputError(f"{error} --overwrite deletes the run that is in it, and starts over.") from error


def commit_folder(directory: RunDirectory, commit_dir: str) -> Path | None:
    """Returns the directory with the in-memory checkpoints of a run's last start on this host; None if there are none.

    Each start has its own directory, and links the checkpoint from which it resumed into it, so all checkpoints in it
    belong to the run. Other directories may contain checkpoints of a start that was abandoned.

    Args:
      directory: directory of the run.
      commit_dir: as in `in_memory.parent_directory`.
    """
    last = Path(_starts(directory)[-1].get("commits", ""))
    if not in_memory.belongs_to(last, directory.path):
        return None
    return in_memory.local_path(last, commit_dir)


def is_own(path: StoragePath, directory: RunDirectory) -> bool:
    """Returns whether a checkpoint is in a directory for checkpoints, or in-memory ones, of this run."""
    return path.parent == directory.checkpoints or in_memory.belongs_to(path.parent, directory.path)


def _commits(directory: RunDirectory, commit_dir: str, complete_commits: Sequence[str] | None) -> list[StoragePath]:
    """Returns the in-memory checkpoints to resume from: those of the last start, and the one from which it resumed."""
    folder = commit_folder(directory, commit_dir)
    commits = (
        [path for path in newest(folder) if complete_commits is None or path.name in complete_commits] if folder else []
    )
    resumed_from = path_of(_starts(directory)[-1].get("checkpoint", ""))
    is_commit = in_memory.belongs_to(resumed_from.parent, directory.path) and storage_of(resumed_from).is_directory(
        resumed_from
    )
    return [*commits, resumed_from] if is_commit and resumed_from not in commits else commits


def _own_checkpoints(
    directory: RunDirectory, commit_dir: str, complete_commits: Sequence[str] | None
) -> list[StoragePath]:
    """Returns all checkpoints of a resumed run; before its first one, the one that it began with."""
    checkpoints = newest_first(newest(directory.checkpoints), _commits(directory, commit_dir, complete_commits))
    if checkpoints:
        return checkpoints
    directories = [directory.checkpoints, commit_folder(directory, commit_dir) or directory.checkpoints]
    if damaged := set_aside_in(*directories):
        raise InputError(
            f"A run must resume from a valid checkpoint. Received: {directory.path}, where all checkpoints are "
            f"damaged; the newest is {damaged[-1].name}. Start in another --output_dir, with new weights or with "
            "--resume=PATH of another run."
        )
    began_with = _starts(directory)[0].get("checkpoint", "")
    return [path_of(began_with)] if began_with else []


def _starts(directory: RunDirectory) -> list[dict[str, Any]]:
    """Returns the record of each start of a run; one empty record if there is none."""
    return (directory.read_starts() if directory.is_run else []) or [{}]


def _check_flags(checkpoints: list[StoragePath], flags: Mapping[str, Any]) -> None:
    """Compares the flags with those of the newest readable checkpoint; if there is none, restoring reports it."""
    try:
        saved = first_readable(checkpoints)
    except CorruptCheckpointError:
        return
    different = [name for name in FIXED if name in saved.flags and saved.flags[name] != flags[name]]
    if different:
        saved_flags, given_flags = (
            " ".join(flag_text(name, values[name]) for name in different) for values in (saved.flags, flags)
        )
        raise InputError(
            f"A run must resume with the flags with which it started. Received: {given_flags}, but {saved.path} is of a run "
            f"with {saved_flags}. Use its flags, another --output_dir, or --resume=never with an empty one."
        )


def _began_with_others(directory: RunDirectory, flags: Mapping[str, Any]) -> bool:
    """Returns whether a run was started with other values of flags that must stay the same."""
    recorded = {name: text for name, text in directory.last_flags().items() if name in FIXED}
    return recorded != flag_values([flag_text(name, value) for name, value in flags.items() if name in FIXED])
