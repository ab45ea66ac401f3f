"""Commits: a run's checkpoints on this host, in memory if there is room. Where they lie, and which of them are a run's own."""

import hashlib
import os
import secrets
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
    found = given or environment.get(VARIABLE, "")
    if every and not found:
        raise InputError(
            f"Commits need a directory that outlives the run's processes. Received: --commit_every={every}, without "
            f"--commit_dir, and without {VARIABLE}, which the launcher of a job on one host sets. Add --commit_dir, such as "
            "/dev/shm/mine, or, on several hosts, a directory that they share."
        )
    return os.path.expanduser(found) if every else ""


def new_folder(directory: str | os.PathLike[str], run: Path) -> Path:
    """A folder for a run's commits that nobody has had before, so that who sees it shares its directory.

    Args:
      directory: see `home`.
      run: the run's directory.
    """
    return Path(directory).absolute() / f"{_mark(run)}-{secrets.token_hex(8)}"


def is_of(folder: Path, run: Path) -> bool:
    """Whether a folder of commits was made for the run in this directory; of a copy of the run it was not."""
    return folder.name.startswith(f"{_mark(run)}-")


def _mark(run: Path) -> str:
    return hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
