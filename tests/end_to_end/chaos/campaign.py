"""Runs that are interrupted as determined by seeds, each compared with an uninterrupted run of its strategy."""

import collections
import pathlib
import time
from collections.abc import Iterable
from typing import NamedTuple

from tests.end_to_end.chaos.attempt import attempt, unexpected, uninterrupted
from tests.end_to_end.chaos.ending import Ending, differences, ending
from tests.end_to_end.chaos.plan import END, MISSED, START, STEP, WRITE, plan
from tests.end_to_end.chaos.settings import Setting
from tests.end_to_end.chaos.striking import Pace
from tfdist.errors import TfdistError

_PHASES = (START, STEP, WRITE, END)


class Reference(NamedTuple):
    """A run without interruptions."""

    pace: Pace
    ending: Ending


class Outcome(NamedTuple):
    """The result of one seed.

    Attributes:
      falls: phase of each interruption.
      ends: seconds from each interruption to the end of the last process.
      stopped: number of interruptions that ended the run before its last step.
      problems: descriptions; empty if the run ended like the reference, and every process with an expected exit code.
      seconds: duration.
    """

    falls: list[str]
    ends: list[float]
    stopped: int
    problems: list[str]
    seconds: float


def reference(setting: Setting, home: pathlib.Path) -> Reference:
    """Makes the run with which a strategy's seeds are compared."""
    directory = home / f"{setting.name}-reference"
    pace = uninterrupted(setting, directory)
    made = ending(directory)
    assert not made.proof, made.proof
    return Reference(pace, made)


def outcome(setting: Setting, seed: int, home: pathlib.Path, against: Reference) -> Outcome:
    """Makes the run of a seed: a start for each interruption, and one more, which must complete the run.

    Args:
      setting: what to run.
      seed: determines the interruptions.
      home: parent directory of the run.
      against: reference of the same setting.
    """
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
    """Returns a Markdown table of the interruptions and the differences, for each strategy and in total."""
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
