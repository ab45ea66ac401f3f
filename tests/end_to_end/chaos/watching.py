"""Observes the phase of a run from outside, by polling its directory."""

import os
import pathlib
import re

from tests.end_to_end.chaos.plan import END, START, STEP, WRITE
from tests.end_to_end.chaos.settings import STEPS

_BEING_WRITTEN = re.compile(r"\.step-\d+\.(partial|replaced|pruned)")
_WHOLE = re.compile(r"step-(\d+)")


class Watch:
    """Observes one start of a run; to be created before the start."""

    def __init__(self, directory: pathlib.Path):
        """Args: directory: directory of the run."""
        self._checkpoints = directory / "checkpoints"
        self._last = self._checkpoints / f"step-{STEPS:09d}"
        self._ledgers = directory / "ledger"
        starts = directory / "starts.jsonl"
        self._number = len(starts.read_text(encoding="utf-8").splitlines()) if starts.exists() else 0
        self._has_begun = False

    def has_begun(self) -> bool:
        """Returns whether the first call of the compiled loop has ended on any process, and its examples are recorded."""
        if not self._has_begun:
            files = self._ledgers.glob(f"start-{self._number}-rank-*.bin")
            self._has_begun = any(file.stat().st_size for file in files)
        return self._has_begun

    def is_writing(self) -> bool:
        """Returns whether a checkpoint is being written; remains of an earlier start are removed before the first step."""
        return self.has_begun() and any(_BEING_WRITTEN.fullmatch(name) for name in _names(self._checkpoints))

    @property
    def saved(self) -> int:
        """Step of the newest checkpoint; 0 if there is none."""
        return max((int(match[1]) for match in map(_WHOLE.fullmatch, _names(self._checkpoints)) if match), default=0)

    def phase(self) -> str:
        """Returns START, STEP, WRITE or END."""
        if not self.has_begun():
            return START
        is_writing = self.is_writing()
        if self.has_all_steps():  # old ones may still be being removed, but a rank may have finished training
            return END
        return WRITE if is_writing else STEP

    def has_all_steps(self) -> bool:
        """Returns whether the last checkpoint exists."""
        return self._last.exists()


def _names(directory: pathlib.Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
