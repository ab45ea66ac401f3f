"""Writes the seconds of each unit to tests/seconds.tsv.

    python -m tests.durations

Reads pytest's reports in .pytest_cache/; of a test that is in several, the newest. Replaces the seconds of the units that have
run, if they differ from those written before by more than half, and keeps the others. They are converted to the speed of the
machine that wrote the file first, by the median ratio of what was measured on both.
"""

import collections
import os
import pathlib
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tests import tiers

REPORTS = tiers.TESTS.parent / ".pytest_cache"
_LISTED_SECONDS = 0.2  # what takes less has no line
_SAME = 1.5  # a ratio within which measurements count as equal


class Test(NamedTuple):
    """A test that was run: its identifier relative to tests/, its unit, and its duration in seconds."""

    name: str
    unit: str
    seconds: float


def read(reports: Iterable[pathlib.Path]) -> list[Test]:
    """Returns the tests in reports of pytest's --junit-xml, once each."""
    newest = {test.name: test for path in sorted(reports, key=os.path.getmtime) for test in _read_one(path)}
    return [*newest.values()]


def _read_one(path: pathlib.Path) -> list[Test]:
    tests = []
    for case in ElementTree.parse(path).iter("testcase"):
        module, _, inner = case.attrib["classname"].partition("_test.")  # and the names of classes
        file = module.removeprefix("tests.").removesuffix("_test").replace(".", "/") + "_test.py"
        test = re.sub(r"@[^@]*_test\.py$", "", case.attrib["name"])  # xdist appends the group
        name = "::".join(filter(None, (file, inner.replace(".", "::"), test)))
        unit = case.find("properties/property[@name='unit']")
        tests.append(Test(name, name if unit is None else unit.attrib["value"], float(case.attrib["time"])))
    return tests


def merged(old: Mapping[str, float], tests: Iterable[Test]) -> dict[str, float]:
    """Returns the seconds of units: those written before, and those measured now, at the speed of those before."""
    measured: dict[str, float] = collections.defaultdict(float)
    for test in tests:
        measured[test.unit] += test.seconds
    ratios = [old[unit] / seconds for unit, seconds in measured.items() if unit in old and seconds > 0]
    speed = statistics.median(ratios) if ratios else 1.0
    result = dict(old)
    for unit, seconds in measured.items():
        if not old.get(unit, 0.0) / _SAME < seconds * speed < old.get(unit, 0.0) * _SAME:
            result[unit] = seconds * speed
    return {unit: result[unit] for unit in sorted(result) if result[unit] >= _LISTED_SECONDS and exists(unit)}


def exists(unit: str) -> bool:
    """Returns whether a unit's file is there, and has its function."""
    file, _, test = unit.partition("::")
    function = re.split(r"\[", test)[0].rpartition("::")[2]
    path = tiers.TESTS / file
    return path.is_file() and (not function or f"def {function}(" in path.read_text(encoding="utf-8"))


def write(seconds: Mapping[str, float]) -> None:
    """Writes the seconds of units to tests/seconds.tsv."""
    lines = ["# unit\tseconds, written by `python -m tests.durations`"]
    lines += [f"{unit}\t{value:.1f}" for unit, value in seconds.items()]
    tiers.SECONDS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(merged(tiers.read_seconds(), read(REPORTS.glob("**/*.xml"))))
