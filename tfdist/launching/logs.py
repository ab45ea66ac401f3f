"""Where the ranks' logs are written."""

import datetime
import pathlib
from typing import IO

from tfdist.errors import InputError
from tfdist.group import Group

PARENT = pathlib.Path("runs")


def log_directory(path: str, launchers: Group) -> pathlib.Path:
    """Creates the directory.

    Args:
      path: as the flag says; empty for one under runs/ that is new on node 0, and has the same name on all nodes.
      launchers: the launchers of all nodes.

    Raises:
      InputError: it cannot be written.
    """
    try:
        fresh = launchers.broadcast("launch/log_dir", None if path or launchers.rank else str(_new_directory()))
        directory = pathlib.Path(path or fresh)
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".node-{launchers.rank}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"--log_dir must be a directory that can be written. Received: {error.filename} ({error.strerror})."
        ) from error
    return directory


def open_log(path: pathlib.Path, number: int) -> IO[bytes]:
    """Opens a rank's log, unbuffered, behind what is in it: of an earlier attempt, or an earlier launch.

    Args:
      path: the file.
      number: of the attempt, 0 for the first.
    """
    log = open(path, "ab", buffering=0)
    if log.tell():
        what = f"restart {number}" if number else "another launch"
        log.write(f"--- {what}, {datetime.datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
    return log


def _new_directory() -> pathlib.Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = PARENT / f"launch-{now}{f'-{number}' if number > 1 else ''}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another launch of the same second
            number += 1
            continue
        return path
