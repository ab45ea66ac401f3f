"""Runs that are interrupted as seeds say, each held against the run of its strategy that nobody interrupts."""

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
    """A run that nobody interrupted."""

    pace: Pace
    ending: Ending


class Outcome(NamedTuple):
    """What became of one seed.

    Attributes:
      falls: where the blows fell, one word each.
      ends: seconds from each blow to the end of the last process.
      stopped: how many of the blows ended the run before its last step.
      problems: in words; empty if the run ended as the reference, and no process in an unexpected way.
      seconds: that it took.
    """

    falls: list[str]
    ends: list[float]
    stopped: int
    problems: list[str]
    seconds: float


def reference(setting: Setting, home: pathlib.Path) -> Reference:
    """Makes the run that a strategy's seeds are held against."""
    directory = home / f"{setting.name}-reference"
    pace = uninterrupted(setting, directory)
    made = ending(directory)
    assert not made.proof, made.proof
    return Reference(pace, made)


def outcome(setting: Setting, seed: int, home: pathlib.Path, against: Reference) -> Outcome:
    """Makes the run of a seed: each start with its blow, and one more, which must come to the end.

    Args:
      setting: what to run.
      seed: what befalls it.
      home: gets the run's directory.
      against: of the same setting.
    """
    begun, directory = time.monotonic(), home / f"{setting.name}-{seed}"
    befalls = plan(setting.name, seed, setting.processes)
    falls, ends, problems, stopped = [], [], [], 0
    for number, blow in enumerate([*befalls.interruptions, None]):
        try:
            made = attempt(setting, directory, befalls, blow, against.pace)
        except AssertionError as hung:
            problems.append(f"start {number} with {blow} did not end:\n{hung}")
            break
        problems += [f"start {number} with {blow}: {said}\n{made.output}" for said in unexpected(made, blow)]
        falls += [made.fell] if blow else []
        ends += [made.seconds] if blow and made.fell != MISSED else []
        stopped += made.fell in (START, STEP, WRITE) and any(made.codes)
    return Outcome(falls, ends, stopped, problems or _different(directory, against), time.monotonic() - begun)


def _different(directory: pathlib.Path, against: Reference) -> list[str]:
    try:
        return differences(ending(directory), against.ending)
    except (TfdistError, OSError) as error:  # there is no such end
        return [str(error)]


def table(outcomes: Iterable[tuple[str, Outcome]]) -> str:
    """Where the blows fell, and what was different, as a table in Markdown; for each strategy and all together."""
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
