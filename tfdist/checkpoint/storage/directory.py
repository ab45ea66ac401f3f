"""The directory of a run's checkpoints, and cleaning up after processes that were killed.

step-000000120            a complete checkpoint; renamed to this once all of it was on disk
.step-000000120.partial   one that is being written
.step-000000120.replaced  the former one of the same step, until the new one has been renamed
.step-000000120.pruned    an old one that is being removed
step-000000120.damaged    one that was set aside

Removing may fail: on NFS, a directory is not empty while somebody reads a file that was in it. The remains do no harm,
and are removed at the next write.
"""

import contextlib
import functools
import itertools
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_WHOLE = re.compile(r"step-([0-9]{9,18})")
_LEFT = re.compile(r"\.(step-[0-9]{9,18})\.(partial|replaced|pruned(?:-[0-9]+)?)")

_log = logging.getLogger(__name__)


def name(step: int) -> str:
    """Returns the directory name of a step's checkpoint."""
    return f"step-{step:09d}"


def is_name(text: str) -> bool:
    """Returns whether this is the directory name of a checkpoint."""
    return _WHOLE.fullmatch(text) is not None


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint found by `newest`."""
    return int(path.name.removeprefix("step-"))


def partial(directory: Path, step: int) -> Path:
    """Returns the directory in which a step's checkpoint is written."""
    return directory / f".{name(step)}.partial"


def newest(directory: str | os.PathLike[str]) -> list[Path]:
    """Returns the complete checkpoints by decreasing step; an empty list if there is no such directory.

    They may be corrupted, which is detected by `Checkpoint.open` and by reading.
    """
    found = [(int(match[1]), path) for path, match in _matching(Path(directory), _WHOLE)]
    return [path for _, path in sorted(found, reverse=True)]


def checkpoints_at(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the checkpoints at a path, the newest first: itself, those in it, or those of the run there."""
    path = Path(path).expanduser()
    if is_name(path.name) and not (path / "checkpoints").exists():
        return [path]
    return newest(path) or newest(path / "checkpoints")


def set_aside(path: str | os.PathLike[str]) -> Path:
    """Renames a checkpoint so that `newest` does not find it; returns its new path.

    Raises:
      OSError: it cannot be renamed.
    """
    return _renamed(Path(path), f"{Path(path).name}.damaged")


def _renamed(path: Path, wanted: str) -> Path:
    """Renames a directory; appends a number if the name exists already."""
    names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    return path.rename(next(place for each in names if not (place := path.with_name(each)).exists()))


def set_aside_in(*directories: Path) -> list[Path]:
    """Returns the checkpoints in these directories that `set_aside` has renamed."""
    return sorted(path for home in directories for path in home.glob("step-*.damaged*"))


def clean_partial(directory: str | os.PathLike[str]) -> None:
    """Removes what killed processes have left; to be called while nobody writes there.

    Logs a warning about what cannot be removed.

    Raises:
      OSError: the directory cannot be read, or the last checkpoint cannot be renamed back.
    """
    for path, match in _matching(Path(directory), _LEFT):
        whole = path.with_name(match[1])
        if match[2] == "replaced" and not whole.exists():
            path.rename(whole)  # killed between two renames, so the former one is the only one
        else:
            _discard(path)


@contextlib.contextmanager
def _tried(path: Path) -> Iterator[None]:
    """Turns an error into a warning, logged once per directory; the remains do no harm."""
    try:
        yield
    except OSError as error:
        _warn(path, error.strerror or str(error))


@functools.cache  # because removal is retried with each checkpoint
def _warn(path: Path, why: str) -> None:
    _log.warning("%s could not be cleared away (%s). That is tried again.", path, why)


def make_partial(directory: Path, step: int) -> Path:
    """Creates an empty directory to write a step's checkpoint, and removes what killed processes have left.

    Raises:
      OSError: as raised by the system.
    """
    directory.mkdir(parents=True, exist_ok=True)
    clean_partial(directory)
    path = partial(directory, step)
    if path.is_dir():  # it could not be removed
        _renamed(path, _pruned(directory / name(step)))
    path.mkdir()
    return path


def publish(written: Path, whole: Path) -> None:
    """Renames a written checkpoint to its final name, replacing an existing one.

    If the replaced checkpoint cannot be removed, a warning is logged.

    Args:
      written: directory with all files, which have been flushed to disk.
      whole: final name, in the same parent directory.

    Raises:
      OSError: as raised by the system.
    """
    _synchronize(written)
    former = whole.with_name(f".{whole.name}.replaced")
    replaces = whole.exists()
    if replaces:
        if former.exists():  # it could not be removed
            _renamed(former, _pruned(whole))
        whole.rename(former)
    try:
        written.rename(whole)
    except OSError:
        if replaces:
            former.rename(whole)
        raise
    _synchronize(whole.parent)
    if replaces:
        _discard(former)


def prune(directory: Path, keep: int, written: Path) -> None:
    """Removes all but the newest checkpoints; logs a warning about those that cannot be removed.

    Args:
      directory: directory of checkpoints.
      keep: number of checkpoints to keep.
      written: the checkpoint that was just written, which is always kept.

    Raises:
      OSError: the directory cannot be read.
    """
    for path in newest(directory)[keep:]:
        if path != written:
            with _tried(path):
                _discard(_renamed(path, _pruned(path)))


def remove(path: Path) -> None:
    """Removes a checkpoint.

    Raises:
      OSError: as raised by the system.
    """
    shutil.rmtree(_renamed(path, _pruned(path)))


def _pruned(whole: Path) -> str:
    """Returns a checkpoint's name during removal: an incomplete one must not have the name of a complete one."""
    return f".{whole.name}.pruned"


def _discard(path: Path) -> None:
    with _tried(path):
        shutil.rmtree(path)


def _matching(directory: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    if directory.is_dir():
        for path in list(directory.iterdir()):
            match = pattern.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                yield path, match


def _synchronize(directory: Path) -> None:
    """Flushes the entries of a directory to disk, so that they survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
