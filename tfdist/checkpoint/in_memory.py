"""Directories of in-memory checkpoints (commits) on each host."""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from tfdist.errors import InputError
from tfdist.storage import StoragePath, storage_of

# Environment variable with a directory on this host that the launcher creates for its job; it outlives the processes.
VARIABLE = "TFDIST_COMMITS"


def required_parent(every: int, commit_dir: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the parent of the runs' directories of in-memory checkpoints; "" for a run without them (`every` is 0).

    Raises:
      InputError: the directory is unknown, see `parent_directory`, or writable by other users.
    """
    parent = parent_directory(commit_dir, environment) if every else ""
    if parent:
        _check_private(Path(parent))
    elif every:
        raise InputError(
            f"Commits need a directory that outlives the run's processes. Received: --commit_every={every}, without "
            f"--commit_dir, and without {VARIABLE}, which tfdist launch sets. Add --commit_dir, such as /dev/shm/mine."
        )
    return parent


def _check_private(directory: Path) -> None:
    """Raises `InputError` if other users could replace a directory, which may be missing, or its contents."""
    try:
        status = directory.stat()
        owners = {directory.lstat().st_uid, status.st_uid}  # of a link, and of its target
    except OSError:  # missing, or an error that its creation reports
        return
    is_owner = owners == {os.geteuid()}
    if not is_owner or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = "writable by other users" if is_owner else "another user's"
        raise InputError(
            f"Only the user of a run may write to its directory of commits. Received: --commit_dir={directory}, which is "
            f"{reason}. Give a directory of your own with the mode 700, such as /dev/shm/mine."
        )


def parent_directory(commit_dir: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the parent directory of in-memory checkpoints on this host, by default the launcher's; "" if none is known."""
    return os.path.expanduser(commit_dir or environment.get(VARIABLE, ""))


def local_path(recorded_path: Path, commit_dir: str) -> Path:
    """Returns the path on this host of a directory of in-memory checkpoints that any host recorded."""
    parent = parent_directory(commit_dir)
    local_directory = Path(parent).absolute() / recorded_path.name if parent else recorded_path
    return recorded_path if recorded_path.is_dir() and not local_directory.is_dir() else local_directory


def new_name(run: StoragePath) -> str:
    """Returns a unique name for the in-memory checkpoints of a start of the run in `run`.

    Each start has its own directory, so checkpoints on a host that was temporarily missing are never attributed to a
    start that did not know them.
    """
    return f"{_run_hash(run)}-{secrets.token_hex(8)}"


def link_checkpoint(checkpoint: StoragePath, folder: Path) -> None:
    """Hard-links the in-memory checkpoint that a start resumes from into its own directory.

    Does nothing for a durable checkpoint, or one on another device.
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


def remove_other_starts(checkpoint: StoragePath, folder: Path) -> None:
    """Removes the directories of other starts of the run, unless linking the checkpoint of this start has failed."""
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
