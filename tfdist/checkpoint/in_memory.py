"""Directories of in-memory checkpoints (commits) on each host, and their assignment to runs."""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from tfdist.errors import InputError
from tfdist.storage import StoragePath, storage_of

VARIABLE = (
    "TFDIST_COMMITS"  # a directory on this host, created by a launcher for its job; it outlives the job's processes
)


def required_parent(every: int, commit_dir: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the directory in which runs have their directories of in-memory checkpoints; "" for a run without them.

    Args:
      every: number of steps between in-memory checkpoints; 0 for none.
      commit_dir: the directory; empty for the launcher's.
      environment: contains the launcher's directory.

    Raises:
      InputError: in-memory checkpoints are enabled, but no directory is known, or others can write to it.
    """
    parent = parent_directory(commit_dir, environment)
    if every and parent:
        _check_private(Path(parent))
    if every and not parent:
        raise InputError(
            f"Commits need a directory that outlives the run's processes. Received: --commit_every={every}, without "
            f"--commit_dir, and without {VARIABLE}, which tfdist launch sets. Add --commit_dir, such as /dev/shm/mine."
        )
    return parent if every else ""


def _check_private(directory: Path) -> None:
    """Raises `InputError` if other users could replace a directory or its contents; it may be missing."""
    try:
        status = directory.stat()
        owners = {directory.lstat().st_uid, status.st_uid}  # of a link, and of its target
    except OSError:  # missing, or reported when it is created
        return
    is_own = owners == {os.geteuid()}
    if not is_own or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = "writable by other users" if is_own else "another user's"
        raise InputError(
            f"Only the user of a run may write to its directory of commits. Received: --commit_dir={directory}, which is "
            f"{reason}. Give a directory of your own with the mode 700, such as /dev/shm/mine."
        )


def parent_directory(commit_dir: str, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the parent directory of in-memory checkpoints on this host, enabled or not; "" if none is known."""
    return os.path.expanduser(commit_dir or environment.get(VARIABLE, ""))


def local_path(recorded: Path, commit_dir: str) -> Path:
    """Returns the path on this host of a directory of in-memory checkpoints that was recorded on this or another host.

    Args:
      recorded: its path there.
      commit_dir: as in `parent_directory`.
    """
    parent = parent_directory(commit_dir)
    local = Path(parent).absolute() / recorded.name if parent else recorded
    return recorded if recorded.is_dir() and not local.is_dir() else local


def new_name(run: StoragePath) -> str:
    """Returns a unique name for the directory of a start's in-memory checkpoints.

    Each start has its own directory, so that those on a host that was temporarily missing are never attributed to a
    start that did not know of them.

    Args:
      run: directory of the run.
    """
    return f"{_mark(run)}-{secrets.token_hex(8)}"


def link_checkpoint(checkpoint: StoragePath, folder: Path) -> None:
    """Hard-links the in-memory checkpoint from which a start resumes into its own directory, to be used again.

    Does nothing for a durable checkpoint, or one on another device.
    """
    target = folder / checkpoint.name
    partial = folder / f".{target.name}.partial"
    if _run_of(checkpoint.parent) != _run_of(folder):
        return
    try:
        partial.mkdir()
        for file in Path(str(checkpoint)).iterdir():
            os.link(file, partial / file.name)
        partial.rename(target)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)


def remove_other_starts(checkpoint: StoragePath, folder: Path) -> None:
    """Removes the directories of other starts of the same run, unless this start could not link the one it needs."""
    if _run_of(checkpoint.parent) == _run_of(folder) and not (folder / checkpoint.name).exists():
        return
    for other in folder.parent.glob(f"{_run_of(folder)}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def _run_of(folder: StoragePath) -> str:
    return folder.name.partition("-")[0]


def belongs_to(folder: StoragePath, run: StoragePath) -> bool:
    """Returns whether a directory of in-memory checkpoints belongs to the run in `run`, not to a copy of it."""
    return folder.name.startswith(f"{_mark(run)}-")


def _mark(run: StoragePath) -> str:
    return hashlib.sha256(os.fsencode(str(storage_of(run).resolved(run)))).hexdigest()[:16]
