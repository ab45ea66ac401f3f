"""The directory with a run's checkpoints, one directory each, and what is left in it by processes that were killed.

step-000000120            a whole checkpoint: it got this name when everything of it was on the disk
.step-000000120.partial   one that is being written
.step-000000120.replaced  the former one of the same step, until the new one has its name
.step-000000120.pruned    an old one that is being removed
step-000000120.damaged    one that somebody has set aside

What is not needed any more may refuse to go: on NFS a directory is not empty as long as somebody reads a file that was in it.
It is in nobody's way, and the next one to be written removes it.
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
    """The name of a step's checkpoint."""
    return f"step-{step:09d}"


def is_name(text: str) -> bool:
    """Whether a directory of this name is a checkpoint, or was one that is damaged."""
    return _WHOLE.fullmatch(text) is not None


def step_of(path: Path) -> int:
    """The step of a checkpoint that `newest` has found."""
    return int(path.name.removeprefix("step-"))


def partial(directory: Path, step: int) -> Path:
    """Where a step's checkpoint is written."""
    return directory / f".{name(step)}.partial"


def newest(directory: str | os.PathLike[str]) -> list[Path]:
    """Returns the checkpoints that were written wholly, the newest step first; none if there is no such directory.

    Whether one is as it was written, `Checkpoint.open` and reading it tell.
    """
    found = [(int(match[1]), path) for path, match in _matching(Path(directory), _WHOLE)]
    return [path for _, path in sorted(found, reverse=True)]


def checkpoints_at(path: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints that a path names, the newest first: itself, those in it, or those of the run whose directory it is."""
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
    """Gives a directory this name, or, if there is such a one, the name with a number."""
    names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    return path.rename(next(place for each in names if not (place := path.with_name(each)).exists()))


def set_aside_in(*directories: Path) -> list[Path]:
    """What `set_aside` has renamed there."""
    return sorted(path for home in directories for path in home.glob("step-*.damaged*"))


def clean_partial(directory: str | os.PathLike[str]) -> None:
    """Removes what killed processes left; call it when nobody writes there. What cannot be removed is a warning.

    Raises:
      OSError: the directory cannot be read, or the last checkpoint not get its name back.
    """
    for path, match in _matching(Path(directory), _LEFT):
        whole = path.with_name(match[1])
        if match[2] == "replaced" and not whole.exists():
            path.rename(whole)  # killed between two renames: the former one is the last that there is
        else:
            _discard(path)


@contextlib.contextmanager
def _tried(path: Path) -> Iterator[None]:
    """Turns an error into a warning, said once for each directory that stays: nobody needs it, and it is in nobody's way."""
    try:
        yield
    except OSError as error:
        _warn(path, error.strerror or str(error))


@functools.cache  # what stays is tried again with each checkpoint
def _warn(path: Path, why: str) -> None:
    _log.warning("%s could not be cleared away (%s). That is tried again.", path, why)


def make_partial(directory: Path, step: int) -> Path:
    """Makes an empty directory in which a step's checkpoint is written, and clears away what killed processes left.

    Raises:
      OSError: as the system says.
    """
    directory.mkdir(parents=True, exist_ok=True)
    clean_partial(directory)
    path = partial(directory, step)
    if path.is_dir():  # it could not be removed
        _renamed(path, _pruned(directory / name(step)))
    path.mkdir()
    return path


def publish(written: Path, whole: Path) -> None:
    """Gives a checkpoint its name; one that had the name already is replaced. If that cannot be removed it is a warning.

    Args:
      written: the directory with everything of it, whose files are on the disk.
      whole: the name, in the same directory.

    Raises:
      OSError: as the system says.
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
    """Removes all but the newest checkpoints. What cannot be removed is a warning.

    Args:
      directory: with the checkpoints.
      keep: how many stay.
      written: the one that has just been written, which stays in any case.

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
      OSError: as the system says.
    """
    shutil.rmtree(_renamed(path, _pruned(path)))


def _pruned(whole: Path) -> str:
    """The name of a checkpoint that is being removed: half of one must never have the name of a whole one."""
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
    """Makes names in a directory survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
