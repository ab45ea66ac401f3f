"""Where a run is, as its directory shows it from outside, many times a second."""

import os
import pathlib
import re

from tests.end_to_end.chaos.plan import END, START, STEP, WRITE
from tests.end_to_end.chaos.settings import STEPS

_BEING_WRITTEN = re.compile(r"\.step-\d+\.(partial|replaced|pruned)")
_WHOLE = re.compile(r"step-(\d+)")


class Watch:
    """Looks at one start of a run; made before the start."""

    def __init__(self, directory: pathlib.Path):
        """Args: directory: of the run."""
        self._checkpoints = directory / "checkpoints"
        self._last = self._checkpoints / f"step-{STEPS:09d}"
        self._ledgers = directory / "ledger"
        starts = directory / "starts.jsonl"
        self._number = len(starts.read_text(encoding="utf-8").splitlines()) if starts.exists() else 0
        self._has_begun = False

    def has_begun(self) -> bool:
        """Whether the first call of the compiled loop has ended on a process: its examples are recorded."""
        if not self._has_begun:
            files = self._ledgers.glob(f"start-{self._number}-rank-*.bin")
            self._has_begun = any(file.stat().st_size for file in files)
        return self._has_begun

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written; what a former start has left is removed before the first step."""
        return self.has_begun() and any(_BEING_WRITTEN.fullmatch(name) for name in _names(self._checkpoints))

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return max((int(match[1]) for match in map(_WHOLE.fullmatch, _names(self._checkpoints)) if match), default=0)

    def phase(self) -> str:
        """START, STEP, WRITE or END."""
        if not self.has_begun():
            return START
        is_writing = self.is_writing()
        if self.has_all_steps():  # older ones may still be removed, but a rank may have left the training
            return END
        return WRITE if is_writing else STEP

    def has_all_steps(self) -> bool:
        """Whether the last checkpoint is there."""
        return self._last.exists()


def _names(directory: pathlib.Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
