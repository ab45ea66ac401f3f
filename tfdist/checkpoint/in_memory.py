"""Names, finds and cleans up the directories of in-memory checkpoints (commits) on each host."""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from tfdist.errors import InputError
from tfdist.storage import StoragePath, storage_of

# Environment variable with the path of a directory that the launcher creates for its job on this host, and that outlives
# the job's processes.
DIRECTORY_VARIABLE = "TFDIST_COMMITS"


def required_parent(every: int, commit_dir: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the parent directory of in-memory checkpoints; "" for a run without in-memory checkpoints (`every` is 0).

    Raises:
      InputError: the directory is not specified (see `parent_directory`), or other users can write to it.
    """
    parent = parent_directory(commit_dir, environment) if every else ""
    if parent:
        _check_private(Path(parent))
    elif every:
        raise InputError(
            "In-memory checkpoints need a directory that outlives the run's processes. Received: "
            f"--commit_every={every}, without --commit_dir, and without {DIRECTORY_VARIABLE}, which tfdist launch sets. Add "
            "--commit_dir, such as /dev/shm/mine."
        )
    return parent


def _check_private(directory: Path) -> None:
    """Raises `InputError` if other users could replace a directory, which need not exist yet, or its contents."""
    try:
        status = directory.stat()
        owners = {directory.lstat().st_uid, status.st_uid}  # owners of a link and of its target
    except OSError:  # it does not exist, or its creation will report the error
        return
    is_owner = owners == {os.geteuid()}
    if not is_owner or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = "writable by other users" if is_owner else "owned by another user"
        raise InputError(
            "Only the user of a run may write to its directory of in-memory checkpoints. Received: "
            f"--commit_dir={directory}, which is {reason}. Use a directory that you own, with mode 700, such as /dev/shm/mine."
        )


def parent_directory(commit_dir: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the parent directory of in-memory checkpoints on this host, by default the launcher's; "" if unknown."""
    return os.path.expanduser(commit_dir or environment.get(DIRECTORY_VARIABLE, ""))


def local_path(recorded_path: Path, commit_dir: str) -> Path:
    """Returns this host's path of a directory of in-memory checkpoints, given the path that some host recorded."""
    parent = parent_directory(commit_dir)
    local_directory = Path(parent).absolute() / recorded_path.name if parent else recorded_path
    return recorded_path if recorded_path.is_dir() and not local_directory.is_dir() else local_directory


def unique_name(run: StoragePath) -> str:
    """Returns a unique name for the directory of in-memory checkpoints of one attempt at the run in `run`.

    Each attempt has its own directory, so checkpoints on a host that was temporarily missing are never attributed to an
    attempt that did not know them.
    """
    return f"{_run_hash(run)}-{secrets.token_hex(8)}"


def link_checkpoint(checkpoint: StoragePath, folder: Path) -> None:
    """Hard-links the in-memory checkpoint from which an attempt resumes into the attempt's own directory.

    Does nothing if the checkpoint is durable, or on another device.
    """
    target = folder / checkpoint.name
    partial = folder / f".{target.name}.partial"
    if _run_id(checkpoint.parent) != _run_id(folder):
        return
    try:
        partial.mkdir()
        for file in Path(str(checkpoint)).iterdir():
            os.link(file, partial / file.name)
        partial.rename(target)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)


def remove_other_attempts(checkpoint: StoragePath, folder: Path) -> None:
    """Removes the directories of other attempts at the run, unless linking the checkpoint of this attempt has failed."""
    if _run_id(checkpoint.parent) == _run_id(folder) and not (folder / checkpoint.name).exists():
        return
    for path in folder.parent.glob(f"{_run_id(folder)}-*"):
        if path != folder:
            shutil.rmtree(path, ignore_errors=True)


def _run_id(folder: StoragePath) -> str:
    return folder.name.partition("-")[0]


def belongs_to(folder: StoragePath, run: StoragePath) -> bool:
    """Returns whether a directory of in-memory checkpoints belongs to the run in `run`, rather than to a copy of it."""
    return folder.name.startswith(f"{_run_hash(run)}-")


def _run_hash(run: StoragePath) -> str:
    return hashlib.sha256(os.fsencode(str(storage_of(run).real_path(run)))).hexdigest()[:16]
