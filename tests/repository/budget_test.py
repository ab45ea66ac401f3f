"""What the tests may weigh, by `tests/seconds.tsv` and by counting: no clock is read.

The limits only fall: who makes the tests lighter lowers them.
"""

import ast
import collections
import re

import pytest

from tests import durations, tiers
from tests.repository.architecture_test import ROOT, runs_when_started

# Sums over the units of the quick tier, in seconds of the machine that wrote seconds.tsv: those that compute run on two cores,
# those that wait run four at a time.
QUICK_SECONDS = 900
QUICK_WAITING_SECONDS = 600

LINES = 64_848
FUNCTIONS_WITH_PROCESSES = 522
SLEEPS = 84

FILES = sorted((ROOT / "tests").rglob("*.py"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in FILES}
ENGINES = {"tensorflow", "gloo", "mpi", "dtensor"}  # that carry tensors between processes


def quick_units(request: pytest.FixtureRequest) -> list[tiers.Unit]:
    """Returns the units of the quick tier among those that this session has collected; in `make test`, all."""
    return tiers.units_of_tier(request.config.stash[tiers.UNITS], "quick")


def test_the_quick_tier_is_quick(request: pytest.FixtureRequest):
    waits, computes = (
        [unit.seconds for unit in quick_units(request) if ("waits" in unit.marks) == waiting]
        for waiting in (True, False)
    )
    assert sum(computes) <= QUICK_SECONDS
    assert sum(waits) <= QUICK_WAITING_SECONDS


def test_few_quick_tests_take_longer(request: pytest.FixtureRequest):
    """The cheapest of a file that starts no process, or its `smoke` tests: one, or one for each of two commands."""
    slow = [u for u in quick_units(request) if u.seconds > tiers.QUICK_SECONDS and "waits" not in u.marks]
    smoke = collections.Counter(unit.path for unit in slow if "smoke" in unit.marks)
    cheapest = collections.Counter(unit.path for unit in slow if "smoke" not in unit.marks)
    assert all(count <= 2 for count in smoke.values())
    assert all(count == 1 for count in cheapest.values()) and smoke.keys().isdisjoint(cheapest)
    assert not [unit.name for unit in slow if "processes" in unit.marks and "smoke" not in unit.marks]


def test_each_strategy_command_and_engine_starts_in_the_quick_tier():
    """As `pytest.mark.smoke` names them."""
    strategies = {path.stem for path in (ROOT / "strategies").glob("*.py")} - {"__init__"}
    commands = {path.stem for path in (ROOT / "tfdist").glob("[a-z]*.py") if runs_when_started(f"tfdist.{path.stem}")}
    marks = re.findall(r"mark\.smoke\(([^)]*)\)", "\n".join(TEXTS.values()))
    assert {name for mark in marks for name in ast.literal_eval(f"({mark},)")} == strategies | commands | ENGINES


def test_seconds_are_of_tests_that_are_there():
    assert not [unit for unit in tiers.read_seconds() if not durations.exists(unit)]


def functions_with_processes() -> int:
    """Returns the number of functions with tests that are marked as `processes`, each or by their module."""
    count = 0
    for text in TEXTS.values():
        if "mark.processes" in text:
            tree = ast.parse(text)
            functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"]
            marked = [function for function in functions if "mark.processes" in ast.unparse(function.decorator_list)]
            count += len(functions if re.search(r"^pytestmark = .*mark\.processes", text, re.MULTILINE) else marked)
    return count


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (sum(len(text.splitlines()) for text in TEXTS.values()), LINES),
        (functions_with_processes(), FUNCTIONS_WITH_PROCESSES),
        (sum(len(re.findall(r"\bsleep\(\d", text)) for text in TEXTS.values()), SLEEPS),
    ],
    ids=["lines", "functions with processes", "literal sleeps"],
)
def test_what_only_falls(value: int, limit: int):
    assert value <= limit, "Make the tests lighter, or move the assertion to where the decision is made."
    assert value >= 0.98 * limit - 1, f"The tests are lighter: lower the limit to {value}."
