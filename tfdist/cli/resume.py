"""Decides how a run starts: at step 0, or from a checkpoint of its own directory or of another run."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfdist.checkpoint import in_memory
from tfdist.checkpoint.format import (
    CorruptCheckpointError,
    checkpoints_at,
    complete_checkpoints,
    damaged_checkpoints,
    first_readable_checkpoint,
    newest_first,
)
from tfdist.cli.early_checks import ProcessContext
from tfdist.config.conflicts import flag_text
from tfdist.config.fields import field_names
from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError
from tfdist.launcher.attempt import JOB_NAME_VARIABLE, RESTART_VARIABLE
from tfdist.reporting import RunDirectory
from tfdist.reporting.file_errors import reraise_as_access_error
from tfdist.reporting.run_directory import flag_values
from tfdist.storage import StoragePath, path_of, storage_of

AUTO, NEVER = "auto", "never"
END_FLAGS = ("best", "early_stopping", "callbacks")  # determine the end of a run, besides its length
FIXED_FLAGS = field_names(TrainConfig, "fixed")  # must not change when a run is resumed


class Origin(NamedTuple):
    """The checkpoints from which a run starts."""

    checkpoints: list[str]  # checkpoints to try, including in-memory ones, the newest first; empty for step 0
    continues_run: bool  # whether the output directory already contains this run


@reraise_as_access_error()
def origin(
    resume: str,
    directory: RunDirectory,
    flags: Mapping[str, Any],
    job_name: str = "",
    complete_commits: Sequence[str] | None = None,
) -> Origin:
    """Decides how a run with these flags starts, on the chief, without changing any files.

    `job_name` is the name of the job if a launcher has restarted it; a job continues a run that it has started.
    `complete_commits` are the names of the complete in-memory checkpoints of the last attempt; None for all.

    Raises:
      InputError: there is no checkpoint to resume from although one was requested, the checkpoint belongs to another run, or
        the directory contains other files.
    """
    is_overwritten = overwrites(directory, flags, job_name)
    is_own_run = not is_overwritten and _is_own_run(resume, directory, job_name)
    if not is_own_run:
        if not is_overwritten:
            _check_empty(directory)
        if resume in (AUTO, NEVER):
            return Origin([], False)
    checkpoints = (
        _run_checkpoints(directory, flags["commit_dir"], complete_commits) if is_own_run else checkpoints_at(resume)
    )
    if is_overwritten and any(belongs_to_run(path, directory) for path in checkpoints):
        raise InputError(
            "A run cannot start from a checkpoint that it deletes. Received: "
            f"--overwrite with --resume={resume}, which is in {directory.path}. Pass another --output_dir."
        )
    if checkpoints:
        check_flags(checkpoints, flags)
    elif not is_own_run:
        raise InputError(
            "--resume must be auto, never, or the directory of a checkpoint or of a run with checkpoints. Received: "
            f"{resume}. A run's checkpoints are in its directory `checkpoints`."
        )
    elif directory.is_done or _has_different_flags(directory, flags):
        _check_empty(directory)  # raises: a finished run or another run must not be overwritten
    return Origin([str(path) for path in checkpoints], is_own_run)


def decide_start(config: TrainConfig, directory: RunDirectory) -> tuple[str, Origin]:
    """Returns the results of `finished_message` and `origin`."""
    arguments = config.resume, directory, dataclasses.asdict(config), restarted_job()
    message = finished_message(*arguments)
    return message, Origin([], True) if message else origin(*arguments)


def decide_start_early(config: TrainConfig, context: ProcessContext) -> tuple[str, Origin] | None:
    """Validates the paths. Returns the result of `decide_start` for one process with an output directory, else None."""
    for path in (config.output_dir, config.resume):
        path_of(path)
    if not config.output_dir or context.cluster.size > 1:
        return None
    return decide_start(config, RunDirectory(path_of(os.path.expanduser(config.output_dir))))


def overwrites(directory: RunDirectory, flags: Mapping[str, Any], job_name: str = "") -> bool:
    """Returns whether the directory contains a run that is to be deleted; see `origin` for the arguments."""
    return bool(flags.get("overwrite")) and directory.is_run and not _is_restart(directory, job_name)


@reraise_as_access_error()
def finished_message(resume: str, directory: RunDirectory, flags: Mapping[str, Any], job_name: str = "") -> str:
    """Returns a message if the run has finished and there is nothing to do, else ""; see `origin` for the arguments."""
    if overwrites(directory, flags, job_name) or not _is_own_run(resume, directory, job_name):
        return ""
    end = directory.end_record
    has_different_end = any(end.get(name) != flags.get(name) for name in END_FLAGS)
    if not end or _has_different_flags(directory, flags) or has_different_end:
        return ""
    reason, length = end.get("reason", ""), "steps" if flags.get("steps") else "epochs"
    if not reason and flags[length] > (end.get(length) or 0):
        return ""
    can_continue = not reason and complete_checkpoints(directory.checkpoints)
    remedy = f"To continue it, pass a larger --{length}. " if can_continue else ""
    return (
        f"This run has finished {f'({reason})' if reason else 'at step ' + str(end['step'])}. Its model is in "
        f"{directory.model}. {remedy}To start over, pass --overwrite."
    )


def restarted_job() -> str:
    """Returns the name of the job if a launcher has restarted it; else empty."""
    return os.environ.get(JOB_NAME_VARIABLE, "") if os.environ.get(RESTART_VARIABLE, "0") != "0" else ""


def _is_restart(directory: RunDirectory, job_name: str) -> bool:
    return job_name != "" and _starts(directory)[-1].get("job_name") == job_name


def _is_own_run(resume: str, directory: RunDirectory, job_name: str) -> bool:
    """Returns whether a directory contains a run that the command continues."""
    if not directory.is_run:
        return False
    # If a command with --resume=PATH is repeated, it continues the run that it started.
    is_same_command = resume != NEVER and directory.last_flags().get("resume") == resume
    return _is_restart(directory, job_name) or resume == AUTO or is_same_command


def _check_empty(directory: RunDirectory) -> None:
    """Raises `InputError` if a directory is not empty, or cannot be written to."""
    try:
        directory.check(directory.path)
    except InputError as error:
        if not directory.is_run:
            raise
        raise InputError(f"{error} --overwrite deletes the run in this directory, and starts over.") from error


def commit_folder(directory: RunDirectory, commit_dir: str) -> Path | None:
    """Returns this host's directory with the in-memory checkpoints of a run's last attempt; None if there is none.

    Each attempt has its own directory, into which it links the checkpoint from which it resumed, so all checkpoints in it
    belong to the run. Other directories may contain checkpoints of an abandoned attempt.
    """
    last_directory = Path(_starts(directory)[-1].get("commits", ""))
    if not in_memory.belongs_to(last_directory, directory.path):
        return None
    return in_memory.local_path(last_directory, commit_dir)


def belongs_to_run(path: StoragePath, directory: RunDirectory) -> bool:
    """Returns whether a checkpoint, possibly in memory, belongs to this run."""
    return path.parent == directory.checkpoints or in_memory.belongs_to(path.parent, directory.path)


def _commits(directory: RunDirectory, commit_dir: str, complete_commits: Sequence[str] | None) -> list[StoragePath]:
    """Returns the in-memory checkpoints of the last attempt, and the one from which it resumed."""
    folder = commit_folder(directory, commit_dir)
    paths = complete_checkpoints(folder) if folder else []
    commits = [path for path in paths if complete_commits is None or path.name in complete_commits]
    resumed_from = path_of(_starts(directory)[-1].get("checkpoint", ""))
    is_commit = in_memory.belongs_to(resumed_from.parent, directory.path)
    is_missing = is_commit and resumed_from not in commits and storage_of(resumed_from).is_directory(resumed_from)
    return [*commits, resumed_from] if is_missing else commits


def _run_checkpoints(
    directory: RunDirectory, commit_dir: str, complete_commits: Sequence[str] | None
) -> list[StoragePath]:
    """Returns all checkpoints of a resumed run, or, if it has none yet, the one from which it started."""
    checkpoints = newest_first(
        complete_checkpoints(directory.checkpoints), _commits(directory, commit_dir, complete_commits)
    )
    if checkpoints:
        return checkpoints
    directories = [directory.checkpoints, commit_folder(directory, commit_dir) or directory.checkpoints]
    if damaged := damaged_checkpoints(*directories):
        raise InputError(
            f"A run must resume from a valid checkpoint. Received: {directory.path}, where all checkpoints are "
            f"damaged; the newest is {damaged[-1].name}. Start in another --output_dir, with new weights or with "
            "--resume=PATH of another run."
        )
    initial_checkpoint = _starts(directory)[0].get("checkpoint", "")
    return [path_of(initial_checkpoint)] if initial_checkpoint else []


def _starts(directory: RunDirectory) -> list[dict[str, Any]]:
    """Returns the records of all attempts of a run, or one empty record if there are none."""
    return (directory.read_starts() if directory.is_run else []) or [{}]


def check_flags(checkpoints: Sequence[StoragePath], flags: Mapping[str, Any]) -> None:
    """Raises `InputError` if the newest readable checkpoint has different flags; if none is, restoring raises later."""
    try:
        source = first_readable_checkpoint(checkpoints)
    except CorruptCheckpointError:
        return
    changed_names = [name for name in FIXED_FLAGS if name in source.flags and source.flags[name] != flags[name]]
    if changed_names:
        saved_flags, new_flags = (
            " ".join(flag_text(name, values[name]) for name in changed_names) for values in (source.flags, flags)
        )
        raise InputError(
            f"A run must resume with the flags it started with. Received: {new_flags}, but {source.path} belongs to a run "
            f"with {saved_flags}. Use these, another --output_dir, or --resume=never with an empty --output_dir."
        )


def _has_different_flags(directory: RunDirectory, flags: Mapping[str, Any]) -> bool:
    saved_values = {name: text for name, text in directory.last_flags().items() if name in FIXED_FLAGS}
    return saved_values != flag_values([flag_text(name, value) for name, value in flags.items() if name in FIXED_FLAGS])
