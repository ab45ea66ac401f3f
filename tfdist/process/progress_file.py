"""How far a process has come, noted where it outlives the process: for a launcher that starts it again."""

import os
import pathlib
from collections.abc import Mapping

VARIABLE = "TFDIST_STEP_NOTE"  # the file that a launcher has made for this process; not set if nobody wants to know
_WIDTH = 20  # bytes, enough for 64 bits
_FINAL = b"!"  # behind the number


class ProgressFile:
    """This process's note, one number in a file: a microsecond each time, no message, exact also after SIGKILL."""

    def __init__(self, environment: Mapping[str, str] = os.environ):
        """Args: environment: says where the file is; without it a note goes nowhere."""
        try:
            self._file = os.open(environment.get(VARIABLE) or os.devnull, os.O_WRONLY)
        except FileNotFoundError:  # somebody has emptied the launcher's directory
            self._file = os.open(os.devnull, os.O_WRONLY)

    def note(self, step: int) -> None:
        """Notes how many updates have been done: at a run's begin, and behind each call of the compiled loop."""
        os.pwrite(self._file, b"%*d" % (_WIDTH, step), 0)

    def close(self) -> None:
        """Gives the file back; the note stays."""
        os.close(self._file)


def forbid_restart(environment: Mapping[str, str] = os.environ) -> None:
    """Notes that nothing of this run must be started again by itself: what it has saved may be wrong."""
    path = pathlib.Path(environment.get(VARIABLE) or os.devnull)
    if not path.exists():  # somebody has emptied the launcher's directory
        path.parent.mkdir(parents=True, exist_ok=True)
        blank(path)
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), _FINAL, _WIDTH)


def blank(path: pathlib.Path) -> None:
    """Makes the file of a process that will start; room for what it notes is taken now, so that a note needs none."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)  # one that is there is written over, and needs no room
    try:
        os.pwrite(file, b" " * (_WIDTH + len(_FINAL)), 0)
    finally:
        os.close(file)


def read(path: pathlib.Path) -> int | None:
    """Returns what a process has noted last, None if nothing."""
    text = path.read_bytes()[:_WIDTH].strip()
    return int(text) if text else None


def forbids_restart(path: pathlib.Path) -> bool:
    """Whether a process has said `forbid_restart`."""
    return path.read_bytes()[_WIDTH:] == _FINAL
