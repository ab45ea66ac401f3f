"""One start of a run, with at most one blow: what befell it, and how its processes ended."""

import pathlib
import signal
import time
from typing import NamedTuple

from tests.end_to_end.chaos.plan import MISSED, STEP, WRITE, Interruption, Plan
from tests.end_to_end.chaos.settings import COMMIT_EVERY, Setting
from tests.end_to_end.chaos.striking import DEADLINE_SECONDS, Pace, Striker
from tests.end_to_end.chaos.watching import Watch
from tfdist.errors import ExitCode
from tfdist.testing import processes

SURVIVORS_SECONDS = 90.0  # for the others to end by themselves, once one of them was struck
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
_KILLED = 128  # what a launcher adds to the number of the signal that ended a rank


class Attempt(NamedTuple):
    """What became of one start.

    Attributes:
      fell: where the blow fell: START, STEP, WRITE or END; MISSED if the run was over; empty if there was none.
      codes: of the processes that the harness started, by rank; of the launcher, if there is one.
      seconds: from the blow, or from the start, to the end of the last process.
      output: what all printed.
    """

    fell: str
    codes: list[int]
    seconds: float
    output: str


def uninterrupted(setting: Setting, directory: pathlib.Path) -> Pace:
    """Makes a run from its start to its end; returns how long that took."""
    with processes.job(setting.launch(directory), 1, _THREADS) as job:
        pace = Striker(job, True, Watch(directory)).pace()
        [end] = job.wait(DEADLINE_SECONDS)
    assert end.code == 0, end.output
    return pace


def attempt(setting: Setting, directory: pathlib.Path, made: Plan, blow: Interruption | None, pace: Pace) -> Attempt:
    """Starts a run, or lets it go on; strikes it, if a blow is given; waits for its end.

    Args:
      setting: what to run.
      directory: of the run.
      made: what befalls it in all its starts.
      blow: what befalls it.
      pace: of the run that nobody interrupts.

    Raises:
      AssertionError: not all processes have ended in time; it has their output.
    """
    memory = f"{directory}-memory"
    flags = [f"--commit_every={COMMIT_EVERY}"] if made.commits else []
    if made.commits and made.launched:
        flags.append(f"--commit_dir={memory}")  # its launcher's own ends with it
    command, size = (
        (setting.launch(directory, *flags), 1)
        if made.launched
        else (setting.train(directory, *flags), setting.processes)
    )
    watch = Watch(directory)
    with processes.job(command, size, _THREADS | {"TFDIST_COMMITS": memory + setting.memory}) as job:
        fell = Striker(job, made.launched, watch).strike(blow, pace) if blow else ""
        struck = time.monotonic()
        ends = job.wait(SURVIVORS_SECONDS if blow and fell != MISSED else DEADLINE_SECONDS)
        seconds = time.monotonic() - struck
    output = "\n".join(f"--- process {number}\n{end.output}" for number, end in enumerate(ends))
    return Attempt(fell, [end.code for end in ends], seconds, output)


def unexpected(made: Attempt, blow: Interruption | None) -> list[str]:
    """Codes with which no process may end here, in words.

    A SIGTERM in a step or a write is heard: all save and end with 75, or, if it came too late for another step, with 0. Before
    and behind the training it ends its process.
    """
    allowed = {int(ExitCode.DONE)}
    if blow and blow.signal == signal.SIGTERM and made.fell in (STEP, WRITE):
        if ExitCode.PREEMPTED in made.codes:
            allowed = {int(ExitCode.PREEMPTED)}
    elif blow and made.fell != MISSED:
        allowed |= {int(ExitCode.PEER_LOST), -blow.signal, _KILLED + blow.signal}
        allowed |= {int(ExitCode.PREEMPTED)} if blow.signal == signal.SIGTERM else set()
    return [f"process {number} ended with {code}" for number, code in enumerate(made.codes) if code not in allowed]
