"""One start of a run, with at most one interruption: where it happened, and how the processes ended."""

import pathlib
import signal
import time
from typing import NamedTuple

from tests import processes
from tests.end_to_end.chaos.plan import MISSED, STEP, WRITE, Interruption, Plan
from tests.end_to_end.chaos.settings import COMMIT_EVERY, Setting
from tests.end_to_end.chaos.striking import DEADLINE_SECONDS, Pace, Striker
from tests.end_to_end.chaos.watching import Watch
from tfdist.errors import ExitCode

SURVIVORS_SECONDS = 90.0  # for the other processes to end by themselves after the interruption of one
_KILLED = 128  # what a launcher adds to the number of the signal that ended a rank


class Attempt(NamedTuple):
    """The result of one start.

    Attributes:
      fell: phase of the interruption: START, STEP, WRITE or END; MISSED if the run was over; empty if there was none.
      codes: exit codes of the processes that were started, by rank; that of the launcher, if there is one.
      seconds: time from the interruption, or from the start, to the end of the last process.
      output: output of all processes.
    """

    fell: str
    codes: list[int]
    seconds: float
    output: str


def uninterrupted(setting: Setting, directory: pathlib.Path) -> Pace:
    """Makes a run without interruptions; returns its pace."""
    with processes.job(setting.launch(directory), 1, processes.ONE_THREAD) as job:
        pace = Striker(job, True, Watch(directory)).pace()
        [end] = job.wait(DEADLINE_SECONDS)
    assert end.code == 0, end.output
    return pace


def attempt(setting: Setting, directory: pathlib.Path, made: Plan, blow: Interruption | None, pace: Pace) -> Attempt:
    """Starts or resumes a run, interrupts it if requested, and waits for its end.

    Args:
      setting: what to run.
      directory: directory of the run.
      made: plan for all starts of the run.
      blow: the interruption of this start; None for none.
      pace: pace of the run without interruptions.

    Raises:
      AssertionError: not all processes have ended in time; contains their output.
    """
    memory = f"{directory}-memory"
    flags = [f"--commit_every={COMMIT_EVERY}"] if made.commits else []
    if made.commits and made.launched:
        flags.append(f"--commit_dir={memory}")  # the launcher would remove its own directory at its end
    command, size = (
        (setting.launch(directory, *flags), 1)
        if made.launched
        else (setting.train(directory, *flags), setting.processes)
    )
    watch = Watch(directory)
    with processes.job(command, size, processes.ONE_THREAD | {"TFDIST_COMMITS": memory + setting.memory}) as job:
        fell = Striker(job, made.launched, watch).strike(blow, pace) if blow else ""
        struck = time.monotonic()
        ends = job.wait(SURVIVORS_SECONDS if blow and fell != MISSED else DEADLINE_SECONDS)
        seconds = time.monotonic() - struck
    output = "\n".join(f"--- process {number}\n{end.output}" for number, end in enumerate(ends))
    return Attempt(fell, [end.code for end in ends], seconds, output)


def unexpected(made: Attempt, blow: Interruption | None, servers: int = 0) -> list[str]:
    """Describes the processes that ended with an unexpected exit code.

    A SIGTERM in a step or a write is handled: all processes save and end with code 75 or, if it was too late for another step,
    with 0. Before and after training it ends its process.
    The last processes, if they are parameter servers, end with 0 when all others have ended.
    """
    allowed = {int(ExitCode.DONE)}
    if blow and blow.signal == signal.SIGTERM and made.fell in (STEP, WRITE):
        if ExitCode.PREEMPTED in made.codes:
            allowed = {int(ExitCode.PREEMPTED)}
    elif blow and made.fell != MISSED:
        allowed |= {int(ExitCode.PEER_LOST), -blow.signal, _KILLED + blow.signal}
        allowed |= {int(ExitCode.PREEMPTED)} if blow.signal == signal.SIGTERM else set()
    served = range(len(made.codes) - servers, len(made.codes))
    wrong = [(n, code) for n, code in enumerate(made.codes) if code not in allowed and not (n in served and not code)]
    return [f"process {number} ended with {code}" for number, code in wrong]
