"""Sends a signal to one rank of a run at the moment given by a plan, as observed in the run's directory."""

import contextlib
import os
import pathlib
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

from tests import jobs as processes
from tests.end_to_end.chaos.settings import END, MISSED, SAVED_EVERY, START, STEP, STEPS, WRITE, Interruption

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
        if not self.has_begun():
            return START
        is_writing = self.is_writing()
        if self.has_all_steps():  # old ones may still be being removed, but a rank may have finished training
            return END
        return WRITE if is_writing else STEP

    def has_all_steps(self) -> bool:
        return self._last.exists()


def _names(directory: pathlib.Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


POLL_SECONDS = 0.001
DEADLINE_SECONDS = 300.0  # for a complete run without interruptions
_LAST_STRUCK = STEPS - 2 * SAVED_EVERY  # late enough, but with the intended phase still ahead
_WRITE_SECONDS = 0.02  # approximate duration of a write


class Pace(NamedTuple):
    """Seconds that a run takes without interruptions: until its first steps, and from there to its last step."""

    start: float
    steps: float


class Striker:
    """Watches one start of a run, and interrupts it once."""

    def __init__(self, job: processes.Job, launched: bool, watch: Watch):
        """Args: job: the ranks or their launcher; launched: whether it is the launcher; watch: watches the directory."""
        self._job = job
        self._launched = launched
        self._watch = watch

    def pace(self) -> Pace:
        """Waits for the last step, without interrupting the run."""
        begun = time.monotonic()
        self._wait(self._watch.has_begun)
        stepping = time.monotonic()
        self._wait(self._watch.has_all_steps)
        return Pace(stepping - begun, time.monotonic() - stepping)

    def strike(self, blow: Interruption, pace: Pace) -> str:
        """Sends the signal; returns the phase, as observed just before, or MISSED if the run was over."""
        if not self._is_time(blow, pace) or not self._wait(lambda: self._victim(blow.rank)):
            return MISSED
        victim, fell = self._victim(blow.rank), self._watch.phase()
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(victim, blow.signal)  # type: ignore[arg-type]  # None if it has ended
            return fell
        return MISSED

    def _is_time(self, blow: Interruption, pace: Pace) -> bool:
        if blow.phase == START:
            return self._pause(blow.moment * pace.start)
        if not self._wait(self._watch.has_begun):
            return False
        first = self._watch.saved
        calls, rest = divmod(blow.moment * (_LAST_STRUCK - first) / SAVED_EVERY, 1)
        if not self._wait(lambda: self._watch.saved >= first + calls * SAVED_EVERY):
            return False
        if blow.phase == STEP:
            pause = rest * pace.steps * SAVED_EVERY / STEPS
            return self._pause(pause) and self._wait(lambda: not self._watch.is_writing())
        return self._is_inside_write(rest * _WRITE_SECONDS)

    def _is_inside_write(self, seconds: float) -> bool:
        while self._wait(self._watch.is_writing):
            time.sleep(seconds)
            if self._watch.is_writing():
                return True
            seconds /= 2  # the write was already over; interrupt the next one earlier
        return False

    def _wait(self, condition: Callable[[], object], seconds: float = DEADLINE_SECONDS) -> bool:
        """Waits for a condition; returns False if the run has ended, or the time is over."""
        end = time.monotonic() + seconds
        while self._runs() and time.monotonic() < end:
            if condition():
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _pause(self, seconds: float) -> bool:
        self._wait(lambda: False, seconds)
        return self._runs()

    def _runs(self) -> bool:
        return all(process.poll() is None for process in self._job.processes)

    def _victim(self, rank: int) -> int | None:
        if self._launched:
            return child_of_rank(self._job.processes[0].pid, rank)
        return self._job.processes[rank].pid


def child_of_rank(launcher: int, rank: int) -> int | None:
    """Returns the id of a launcher's process for a rank; None if it has not started yet. Ranks start in their order."""
    with contextlib.suppress(psutil.Error):
        ranks = [child for child in psutil.Process(launcher).children(recursive=True) if _is_rank(child)]
        ranks.sort(key=lambda process: (process.create_time(), process.pid))
        return ranks[rank].pid if rank < len(ranks) else None
    return None


def _is_rank(process: psutil.Process) -> bool:
    """Returns whether a process is a rank; a forked one has the command line of the tests' fork server."""
    with contextlib.suppress(psutil.Error):  # it has ended
        return process.name() == "tfdist.train" or "tfdist.train" in process.cmdline()
    return False
