"""Manages the directory of a run's checkpoints: finds, publishes and removes checkpoints, and locks the directory.

step-000000120            a complete checkpoint, renamed once its files are durable
.step-000000120.partial   a checkpoint that is being written
.step-000000120.replaced  the previous checkpoint of the same step, until the new one has been renamed
.step-000000120.pruned    an old checkpoint that is being removed
step-000000120.damaged    a checkpoint that was found to be damaged

A removal may fail: on NFS, a directory is not empty while a process reads a file that was in it. The next write retries.
"""

import contextlib
import datetime
import functools
import itertools
import logging
import os
import re
import socket
from collections.abc import Collection, Iterable, Iterator

from tfdist.errors import InputError
from tfdist.storage import AnyPath, StoragePath, path_of, storage_of

_COMPLETE_NAME = re.compile(r"step-([0-9]{9,18})")
_DAMAGED_NAME = re.compile(r"step-.*\.damaged.*")
LOCK_NAME = "lock"
_REMNANT_NAME = re.compile(r"\.(step-[0-9]{9,18})\.(partial|replaced|pruned(?:-[0-9]+)?)")

_log = logging.getLogger(__name__)


def checkpoint_name(step: int) -> str:
    """Returns the directory name of a step's checkpoint."""
    return f"step-{step:09d}"


def step_of(path: StoragePath) -> int:
    """Returns the step of a checkpoint, from its path."""
    return int(path.name.removeprefix("step-"))


def partial_path(directory: StoragePath, step: int) -> StoragePath:
    """Returns the directory in which a step's checkpoint is written."""
    return directory / f".{checkpoint_name(step)}.partial"


def complete_checkpoints(directory: AnyPath) -> list[StoragePath]:
    """Returns the complete checkpoints by decreasing step; an empty list if the directory does not exist.

    They may be corrupted; `Checkpoint.open` and reading them detect this.
    """
    checkpoints = [(int(match[1]), path) for path, match in _find_matches(path_of(directory), _COMPLETE_NAME)]
    return [path for _, path in sorted(checkpoints, key=lambda item: (item[0], item[1].name), reverse=True)]


def newest_first(durable: Iterable[StoragePath], commits: Iterable[StoragePath]) -> list[StoragePath]:
    """Returns durable and in-memory checkpoints by decreasing step; for equal steps, the durable one comes first."""
    return sorted([*durable, *commits], key=step_of, reverse=True)  # a stable sort


def checkpoints_at(path: AnyPath) -> list[StoragePath]:
    """Returns the checkpoints at a path, newest first: the path itself, or the checkpoints in it or in its run."""
    directory = path_of(path)
    run_checkpoints = directory / "checkpoints"
    if _COMPLETE_NAME.fullmatch(directory.name) and not storage_of(run_checkpoints).exists(run_checkpoints):
        return [directory]
    return complete_checkpoints(directory) or complete_checkpoints(run_checkpoints)


def mark_damaged(path: AnyPath) -> StoragePath:
    """Renames a damaged checkpoint, so that `complete_checkpoints` does not find it; returns its new path. Raises `OSError`."""
    checkpoint = path_of(path)
    return _rename(checkpoint, f"{checkpoint.name}.damaged")


def _rename(path: StoragePath, name: str) -> StoragePath:
    """Renames a directory; appends a number if the new name exists."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    storage = storage_of(path)
    target = next(new_path for candidate in names if not storage.exists(new_path := path.with_name(candidate)))
    storage.rename(path, target)
    return target


def damaged_checkpoints(*directories: StoragePath) -> list[StoragePath]:
    """Returns the checkpoints that `mark_damaged` has renamed in the directories."""
    return sorted(path for home in directories for path, _ in _find_matches(home, _DAMAGED_NAME))


def remove_remnants(directory: AnyPath) -> None:
    """Removes what killed processes left behind; no process may be writing to the directory.

    Logs a warning if a removal fails.

    Raises:
      OSError: the directory cannot be read, or the last checkpoint cannot be renamed back.
    """
    for path, match in _find_matches(path_of(directory), _REMNANT_NAME):
        complete_path = path.with_name(match[1])
        storage = storage_of(path)
        if match[2] == "replaced" and not storage.exists(complete_path):
            storage.rename(path, complete_path)  # the process was killed between two renames, so this is the only copy
        else:
            _discard(path)


@functools.cache  # warns once, although removal is retried with each checkpoint
def _warn_about_removal(path: StoragePath, reason: str) -> None:
    _log.warning("%s could not be removed (%s). Its removal will be retried later.", path, reason)


def make_partial(directory: StoragePath, step: int) -> StoragePath:
    """Creates an empty directory for writing a step's checkpoint, and removes what killed processes left behind."""
    storage = storage_of(directory)
    storage.make_directory(directory)
    remove_remnants(directory)
    path = partial_path(directory, step)
    if storage.is_directory(path):  # an earlier partial checkpoint that could not be removed
        _rename(path, _pruned_name(directory / checkpoint_name(step)))
    storage.make_directory(path, is_new=True)
    return path


def publish(source: StoragePath, final: StoragePath) -> None:
    """Renames a complete checkpoint, whose files are durable, within its directory, replacing an existing one.

    Logs a warning if the replaced checkpoint cannot be removed.
    """
    storage = storage_of(final)
    storage.sync_directory(source)
    previous_path = final.with_name(f".{final.name}.replaced")
    has_previous = storage.exists(final)
    if has_previous:
        if storage.exists(previous_path):  # an earlier one that could not be removed
            _rename(previous_path, _pruned_name(final))
        storage.rename(final, previous_path)
    try:
        storage.rename(source, final)
    except OSError:
        if has_previous:
            storage.rename(previous_path, final)
        raise
    storage.sync_directory(final.parent)
    if has_previous:
        _discard(previous_path)


def prune(directory: StoragePath, keep: int, latest: StoragePath, keep_steps: Collection[int] = ()) -> None:
    """Removes all checkpoints except the `keep` newest ones, `latest` (just written), and the checkpoints of `keep_steps`.

    Logs a warning if a checkpoint cannot be removed.
    """
    for path in complete_checkpoints(directory)[keep:]:
        if path != latest and step_of(path) not in keep_steps:
            _discard(path, is_complete=True)


def remove(path: StoragePath) -> None:
    """Removes a checkpoint."""
    storage_of(path).remove_directory(_rename(path, _pruned_name(path)))


def _pruned_name(checkpoint: StoragePath) -> str:
    return f".{checkpoint.name}.pruned"


def _discard(path: StoragePath, is_complete: bool = False) -> None:
    """Removes a directory, after renaming it if it is a complete checkpoint; logs a warning, once, if that fails."""
    try:
        path = _rename(path, _pruned_name(path)) if is_complete else path
        storage_of(path).remove_directory(path)
    except OSError as error:
        _warn_about_removal(path, error.strerror or str(error))


def _find_matches(directory: StoragePath, pattern: re.Pattern[str]) -> Iterator[tuple[StoragePath, re.Match[str]]]:
    storage = storage_of(directory)
    if storage.is_directory(directory):
        for entry in storage.entries(directory):
            match = pattern.fullmatch(entry.name)
            if match and entry.is_directory:
                yield directory / entry.name, match


class LockError(InputError):
    """Raised if a directory cannot be locked, for a reason other than a lock held by another process."""


@contextlib.contextmanager
def lock(directory: AnyPath, remedy: str = "use another --output_dir", *, exclusive: bool = True) -> Iterator[None]:
    """Locks a directory against other processes, on all hosts that share it, until the context exits or the process ends.

    The lock file describes this process, for information only.

    Args:
      directory: existing directory of a run, or of its checkpoints.
      remedy: remedy if the directory cannot be locked, as the end of a sentence.
      exclusive: False only writes the description, for directories without support for locks.

    Raises:
      InputError: another process holds the lock.
      LockError: the directory cannot be locked.
    """
    path = path_of(directory) / LOCK_NAME
    start_time = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
    owner = f"process {os.getpid()} on {socket.gethostname()} since {start_time}\n".encode()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(storage_of(path).lock(path, owner, exclusive=exclusive))
        except BlockingIOError as error:
            holder = " ".join(storage_of(path).read(path).decode(errors="replace").split())
            raise InputError(
                f"Only one run at a time can write to a directory. Received: {path.parent}, which "
                f"{holder or 'another process'} is using. Wait until it ends, stop it, or {remedy}."
            ) from error
        except OSError as error:
            raise LockError(
                f"The directory of a run must support file locks. Received: {path}: {error.strerror}. "
                f"{remedy[0].upper()}{remedy[1:]}."
            ) from error
        yield
