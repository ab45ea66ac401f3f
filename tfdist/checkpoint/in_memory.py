"""Commits: a run's checkpoints on each host, in memory if there is room. Where they lie, and which of them are a run's own."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from tfdist.errors import InputError

VARIABLE = (
    "TFDIST_COMMITS"  # a directory that a launcher has made for its job on this host; it outlives the job's processes
)


def home(every: int, given: str, environment: Mapping[str, str] = os.environ) -> str:
    """The directory in which runs have their folders of commits; empty for a run without commits.

    Args:
      every: steps from one commit to the next; 0 for none.
      given: the directory; empty for the launcher's.
      environment: has the launcher's.

    Raises:
      InputError: there are to be commits, and no directory is known.
    """
    found = place(given, environment)
    if every and not found:
        raise InputError(
            f"Commits need a directory that outlives the run's processes. Received: --commit_every={every}, without "
            f"--commit_dir, and without {VARIABLE}, which tfdist.launch sets. Add --commit_dir, such as /dev/shm/mine."
        )
    return found if every else ""


def place(given: str, environment: Mapping[str, str] = os.environ) -> str:
    """The directory in which runs have their folders of commits on this host, if they make any; empty if none is known."""
    return os.path.expanduser(given or environment.get(VARIABLE, ""))


def here(recorded: Path, given: str) -> Path:
    """Where a folder of commits lies on this host that was recorded on this one or on another.

    Args:
      recorded: its path there.
      given: as for `place`.
    """
    home = place(given)
    own = Path(home).absolute() / recorded.name if home else recorded
    return recorded if recorded.is_dir() and not own.is_dir() else own


def new_name(run: Path) -> str:
    """A name for the folder of a start's commits that no folder has had before.

    Each start has a folder of its own: what it did not know of, on a host that was away, is never taken for its commits.

    Args:
      run: the run's directory.
    """
    return f"{_mark(run)}-{secrets.token_hex(8)}"


def take_along(checkpoint: Path, folder: Path) -> None:
    """Gives the commit that a start goes on from a second name, in its own folder: there may be need of it again.

    A checkpoint is not taken along; nor what lies on another device.
    """
    target = folder / checkpoint.name
    arriving = folder / f".{target.name}.partial"
    if _run_of(checkpoint.parent) != _run_of(folder):
        return
    try:
        arriving.mkdir()
        for file in checkpoint.iterdir():
            os.link(file, arriving / file.name)
        arriving.rename(target)
    except OSError:
        shutil.rmtree(arriving, ignore_errors=True)


def remove_former(checkpoint: Path, folder: Path) -> None:
    """Removes what other starts of the same run have left beside this one's folder; not what it could not take along."""
    if _run_of(checkpoint.parent) == _run_of(folder) and not (folder / checkpoint.name).exists():
        return
    for other in folder.parent.glob(f"{_run_of(folder)}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def _run_of(folder: Path) -> str:
    return folder.name.partition("-")[0]


def is_of(folder: Path, run: Path) -> bool:
    """Whether a folder of commits was made for the run in this directory; of a copy of the run it was not."""
    return folder.name.startswith(f"{_mark(run)}-")


def _mark(run: Path) -> str:
    return hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
