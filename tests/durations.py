"""Prints the time spent in the last `make test`, by folder, and its slowest tests.

    python -m tests.durations

Reads pytest's reports in .pytest_cache/*.xml. Times are sums over tests, including setup; tests that run concurrently take less
time in total.
"""

import collections
import pathlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from typing import NamedTuple

REPORTS = pathlib.Path(__file__).parents[1] / ".pytest_cache"
_SLOWEST = 20


class Test(NamedTuple):
    """A test that was run: its part of `make test`, its location, its name, and its duration in seconds."""

    part: str
    folder: str
    name: str
    seconds: float


def read(path: pathlib.Path) -> list[Test]:
    """Returns the tests in a report of pytest's --junit-xml."""
    found = []
    for case in ElementTree.parse(path).iter("testcase"):
        module = case.attrib["classname"].split(".")
        folder = module[1] if len(module) > 2 else "commands"
        found.append(Test(path.stem, folder, f"{module[-1]}::{case.attrib['name']}", float(case.attrib["time"])))
    return found


def table(tests: Iterable[Test]) -> str:
    """Returns a table of minutes by directory and part, and one of the slowest tests."""
    minutes: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    tests = list(tests)
    for test in tests:
        minutes[test.folder][test.part] += test.seconds / 60
        minutes["all"][test.part] += test.seconds / 60
    parts = sorted({test.part for test in tests})
    lines = [f"| folder | {' | '.join(parts)} |", f"| --- |{' ---: |' * len(parts)}"]
    for folder, found in sorted(minutes.items(), key=lambda item: -sum(item[1].values())):
        lines.append(f"| `{folder}` | {' | '.join(f'{found[part]:.1f}' for part in parts)} |")
    lines += ["", "| seconds | slowest tests |", "| ---: | --- |"]
    slowest = sorted(tests, key=lambda test: -test.seconds)[:_SLOWEST]
    return "\n".join([*lines, *(f"| {test.seconds:.0f} | `{test.name}` |" for test in slowest)])


if __name__ == "__main__":
    print(table(test for path in sorted(REPORTS.glob("*.xml")) for test in read(path)))
