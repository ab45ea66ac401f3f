"""Runs that are interrupted as determined by seeds, each compared with an uninterrupted run of its strategy."""

import collections
import pathlib
import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

from tests import processes
from tests.end_to_end.chaos.ending import Ending, differences, ending
from tests.end_to_end.chaos.settings import (
    COMMIT_EVERY,
    END,
    MISSED,
    START,
    STEP,
    WRITE,
    Interruption,
    Plan,
    Setting,
    plan,
)
from tests.end_to_end.chaos.striking import DEADLINE_SECONDS, Pace, Striker, Watch
from tfdist.errors import ExitCode, TfdistError

SURVIVORS_SECONDS = 90.0  # for the other processes to end by themselves after the interruption of one
_KILLED = 128  # what a launcher adds to the number of the signal that ended a rank


class Attempt(NamedTuple):
    """The result of one start."""

    fell: str  # phase of the interruption; MISSED if the run was over; empty if there was none
    codes: list[int]  # of the processes, by rank; of the launcher, if there is one
    seconds: float  # from the interruption, or from the start, to the end of the last process
    output: str


def uninterrupted(setting: Setting, directory: pathlib.Path) -> Pace:
    with processes.job(setting.launch(directory), 1, processes.ONE_THREAD) as job:
        pace = Striker(job, True, Watch(directory)).pace()
        [end] = job.wait(DEADLINE_SECONDS)
    assert end.code == 0, end.output
    return pace


def attempt(setting: Setting, directory: pathlib.Path, made: Plan, blow: Interruption | None, pace: Pace) -> Attempt:
    """Starts or resumes a run, interrupts it if there is a blow, and waits for its end, which must come in time."""
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


_PHASES = (START, STEP, WRITE, END)


class Reference(NamedTuple):
    pace: Pace
    ending: Ending


class Outcome(NamedTuple):
    """The result of one seed."""

    falls: list[str]  # phase of each interruption
    ends: list[float]  # seconds from each interruption to the end of the last process
    stopped: int  # interruptions that ended the run before its last step
    problems: list[str]  # empty if the run ended like the reference, with expected exit codes
    seconds: float


def reference(setting: Setting, home: pathlib.Path) -> Reference:
    """Makes the run with which a strategy's seeds are compared."""
    directory = home / f"{setting.name}-reference"
    pace = uninterrupted(setting, directory)
    made = ending(directory)
    assert not made.proof, made.proof
    return Reference(pace, made)


def outcome(setting: Setting, seed: int, home: pathlib.Path, against: Reference) -> Outcome:
    """Makes the run of a seed: a start for each interruption, and one more, which must complete the run."""
    begun, directory = time.monotonic(), home / f"{setting.name}-{seed}"
    befalls = plan(setting.name, seed, setting.processes)
    servers = 0 if befalls.launched else setting.servers
    falls, ends, problems, stopped = [], [], [], 0
    for number, blow in enumerate([*befalls.interruptions, None]):
        try:
            made = attempt(setting, directory, befalls, blow, against.pace)
        except AssertionError as hung:
            problems.append(f"start {number} with {blow} did not end:\n{hung}")
            break
        problems += [f"start {number} with {blow}: {said}\n{made.output}" for said in unexpected(made, blow, servers)]
        falls += [made.fell] if blow else []
        ends += [made.seconds] if blow and made.fell != MISSED else []
        stopped += made.fell in (START, STEP, WRITE) and any(made.codes)
    return Outcome(falls, ends, stopped, problems or _different(directory, against), time.monotonic() - begun)


def _different(directory: pathlib.Path, against: Reference) -> list[str]:
    try:
        return differences(ending(directory), against.ending)
    except (TfdistError, OSError) as error:  # the run has not been completed
        return [str(error)]


def table(outcomes: Iterable[tuple[str, Outcome]]) -> str:
    own = collections.defaultdict(list)
    for name, made in outcomes:
        own[name].append(made)
    everything = [made for group in own.values() for made in group]
    head = f"| strategy | seeds | blows | {' | '.join(_PHASES)} | slowest end | a seed takes | differences |"
    rows = [_row(name, group) for name, group in [*own.items(), ("all", everything)]]
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def _row(name: str, group: list[Outcome]) -> str:
    falls = collections.Counter(fell for made in group for fell in made.falls if fell != MISSED)
    total = sum(falls.values())
    shares = [f"{100 * falls[phase] / max(total, 1):.0f}%" for phase in _PHASES]
    slowest = max((seconds for made in group for seconds in made.ends), default=0.0)
    mean = sum(made.seconds for made in group) / max(len(group), 1)
    wrong = sum(bool(made.problems) for made in group)
    return f"| {name} | {len(group)} | {total} | {' | '.join(shares)} | {slowest:.1f} s | {mean:.0f} s | {wrong} |"
