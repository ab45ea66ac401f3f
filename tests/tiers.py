"""Chooses tests by the seconds that they take: a pytest plugin for `make check`, `make test` and continuous integration.

A unit is one test, or the tests of a file that share a job: those that request a fixture of the module, or all, if the file has
a cached function. A unit is never divided: what its tests share is computed once, by one process. `seconds.tsv` has the seconds
of each unit. What it does not list counts as quick, so that a new test always runs.

--tier=plain  tests that neither import TensorFlow nor start processes; importing TensorFlow is an error
--tier=quick  units of at most `QUICK_SECONDS`; those marked as `smoke`; of each file without such, the cheapest slower one
              whose tests run in this process
--tier=slow   the others
--tier=all    all, in the same order: longest first
--slice=N/M   of these, the N-th of M parts that take about as long
--since=REV   of these, also the tests of packages that have changed since a commit: the shortest first, up to
              `CHANGED_SECONDS`
"""

import functools
import pathlib
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import pytest

from tests import import_graph, tensorflow_import

QUICK_SECONDS = 1.0
WAITING_SECONDS = 3.0  # as `QUICK_SECONDS`, for what hardly computes
CHEAPEST_SECONDS = 4.0  # the cheapest slower unit of a file is slow if it takes longer than this
CHANGED_SECONDS = 480.0  # four minutes of two processes

TESTS = pathlib.Path(__file__).parent
SECONDS = TESTS / "seconds.tsv"
# Changes of these concern all packages.
_CONCERNS_ALL = re.compile(
    r"Makefile|setup\.cfg|pyproject\.toml|constraints\.txt|tests/(.+/)?conftest\.py|tfdist/__init__\.py|tfdist/keras_internals/"
    r"|tfdist/distribution/strategy\.py"
)
LEFT_OUT = "tiers/left_out"  # in pytest's cache: how many tests a session with some `-m` has left out


class Unit(NamedTuple):
    """Tests that run together or not at all."""

    name: str  # the identifier of a test, or a file; both relative to tests/
    path: pathlib.Path
    seconds: float
    marks: frozenset[str]  # those of its tests that are in `_MARKS`


UNITS = pytest.StashKey[list[Unit]]()  # all units of the tests that `-m` selects
_UNIT = pytest.StashKey[str]()
_MARKS = ("processes", "smoke", "tensorflow", "waits")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Defines the options."""
    group = parser.getgroup("tiers", "choice of tests by the seconds that they take")
    group.addoption("--tier", choices=("plain", "quick", "slow", "all"), help="Which tests run.")
    group.addoption("--slice", help="N/M: of these tests, the N-th of M parts.")
    group.addoption("--since", metavar="REV", help="Of these tests, also those of packages changed since a commit.")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses TensorFlow to tests of plain Python."""
    if config.getoption("tier") == "plain":
        tensorflow_import.refuse(
            "`make check` runs without TensorFlow. Mark a test that imports it as `tensorflow`, if its file does not import it."
        )


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Does not import the files of which no test would be chosen."""
    file = collection_path / "conftest.py" if collection_path.is_dir() else collection_path
    if file.suffix != ".py" or not file.exists():
        return None
    if config.getoption("tier") == "plain":
        return import_graph.imports_tensorflow(file) or None
    if config.getoption("markexpr").startswith("waits"):
        return (file.name != "conftest.py" and "mark.waits" not in file.read_text(encoding="utf-8")) or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Chooses the tests, and begins with those that take longest."""
    for item in items:
        item.stash[_UNIT] = name = unit_of(item)
        if name.endswith(".py"):  # before xdist reads the groups of --dist=loadgroup
            item.add_marker(pytest.mark.xdist_group(name))
            item.user_properties.append(("unit", name))
    yield
    units = config.stash[UNITS] = _units(items)
    tier, part, revision = (config.getoption(name) for name in ("tier", "slice", "since"))
    if not (tier or part or revision):
        return
    chosen = units_of_tier(units, tier)
    if part or revision:
        selected = {*slice_of(chosen, part)} if part else set()
        selected |= {*changed_units(chosen, changed_packages(revision))} if revision else set()
        chosen = [unit for unit in chosen if unit in selected]
    order = {unit.name: place for place, unit in enumerate(longest_first(chosen))}
    left_out = [item for item in items if item.stash[_UNIT] not in order]
    config.hook.pytest_deselected(items=left_out)
    if cache := getattr(config, "cache", None):
        cache.set(f"{LEFT_OUT}/{config.getoption('markexpr')}", len(left_out))
    items[:] = sorted((item for item in items if item.stash[_UNIT] in order), key=lambda item: order[item.stash[_UNIT]])


def unit_of(item: pytest.Item) -> str:
    """Returns the name of a test's unit."""
    own = item.nodeid.removeprefix("tests/")
    if item.get_closest_marker("separable"):
        return own
    file = item.path.relative_to(TESTS).as_posix()
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009 (pytest has no public name for it)
    shares = any(definition.scope == "module" for definitions in fixtures for definition in definitions)
    module = getattr(item, "module", None)
    # A test that has `request` may ask for any fixture of its module.
    if shares or _has_cached_function(module) or ("request" in item.fixturenames and _has_fixture(module)):
        return file
    return own


@functools.cache
def _has_cached_function(module: object) -> bool:
    functions = (value for value in vars(module).values() if hasattr(value, "cache_clear"))
    return any(str(getattr(function, "__module__", "")).startswith("tests.") for function in functions)


@functools.cache
def _has_fixture(module: object) -> bool:
    """Returns whether a module defines a fixture that its tests share."""
    markers = (getattr(value, "_fixture_function_marker", None) for value in vars(module).values())
    return any(getattr(marker, "scope", None) == "module" for marker in markers)


def _units(items: Iterable[pytest.Item]) -> list[Unit]:
    """Returns the units of tests, in order."""
    seconds = read_seconds()
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.stash[_UNIT], []).append(item)

    return [
        Unit(name, members[0].path, seconds.get(name, 0.0), frozenset(_marks(members)))
        for name, members in tests.items()
    ]


def _marks(items: Iterable[pytest.Item]) -> set[str]:
    return {mark for mark in _MARKS for item in items if item.get_closest_marker(mark)}


def read_seconds() -> dict[str, float]:
    """Returns the seconds of each unit in `seconds.tsv`."""
    lines = SECONDS.read_text(encoding="utf-8").splitlines() if SECONDS.exists() else []
    rows = (line.rsplit("\t", 1) for line in lines if not line.startswith("#"))
    return {name: float(seconds) for name, seconds in rows}


def units_of_tier(units: Collection[Unit], tier: str | None) -> list[Unit]:
    """Returns the units of a tier, in order; all, if it is "all" or None."""
    if tier in ("all", None):
        return [*units]
    if tier == "plain":
        return [unit for unit in units if unit.marks.isdisjoint({"processes", "tensorflow"})]
    quick = _quick_units(units)
    return [unit for unit in units if (unit in quick) == (tier == "quick")]


def _quick_units(units: Collection[Unit]) -> set[Unit]:
    def limit(unit: Unit) -> float:
        return WAITING_SECONDS if "waits" in unit.marks else QUICK_SECONDS

    smoke = {unit for unit in units if "smoke" in unit.marks}
    quick = {unit for unit in units if unit.seconds <= limit(unit)} | smoke
    cheapest: dict[pathlib.Path, Unit] = {}
    for unit in sorted(set(units) - quick, key=lambda unit: (unit.seconds, unit.name)):
        if "processes" not in unit.marks and unit.seconds <= CHEAPEST_SECONDS:
            cheapest.setdefault(unit.path, unit)
    for unit in smoke:
        if unit.seconds > QUICK_SECONDS:
            cheapest.pop(unit.path, None)
    return quick | {*cheapest.values()}


def longest_first(units: Iterable[Unit]) -> list[Unit]:
    """Returns units in the order in which they run: longest first, so that no process has a long one left when others end.

    Those of at most `QUICK_SECONDS` keep their order, in which neighbors import the same modules.
    """
    return sorted(units, key=lambda unit: -unit.seconds if unit.seconds > QUICK_SECONDS else 0.0)


def slice_of(units: Iterable[Unit], text: str) -> list[Unit]:
    """Returns the units of a slice "N/M", with N from 1.

    Raises:
      pytest.UsageError: N is not from 1 to M.
    """
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise pytest.UsageError(f"--slice=N/M must have N from 1 to M. Received: {text}.")
    totals = [0.0] * parts
    chosen = []
    for unit in sorted(units, key=lambda unit: -unit.seconds):
        place = totals.index(min(totals))
        totals[place] += unit.seconds + 0.05  # what is not listed takes some time, too
        if place == number - 1:
            chosen.append(unit)
    return chosen


def changed_units(units: Iterable[Unit], changed: set[str] | None) -> list[Unit]:
    """Returns units of changed packages, the shortest first, as many as fit into `CHANGED_SECONDS`.

    Args:
      units: all.
      changed: names of packages; None if the change concerns all packages.
    """
    chosen, remaining = [], CHANGED_SECONDS
    for unit in sorted(units, key=lambda unit: unit.seconds):
        if changed is None or import_graph.package_of(unit.path.relative_to(TESTS.parent)) in changed:
            remaining -= unit.seconds
            if remaining < 0:
                break
            chosen.append(unit)
    return chosen


def changed_packages(revision: str) -> set[str] | None:
    """Returns the packages with changes since a commit; None if all packages are concerned."""
    command = ["git", "diff", "--name-only", revision]
    changed = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True).stdout.split("\n")
    if any(_CONCERNS_ALL.match(name) for name in changed):
        return None
    files = (pathlib.PurePath(name) for name in changed if name.endswith(".py"))
    return {import_graph.package_of(file) for file in files if file.parts[0] in ("tfdist", "strategies", "tests")}
