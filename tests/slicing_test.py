"""Slices of `make conformance` have every test once, never divide what shares a job, and take about as long."""

import dataclasses
import pathlib
import re

import pytest

from tests import slicing

ROOT = pathlib.Path(__file__).parents[1]
PARTS = 7


@dataclasses.dataclass(frozen=True)
class Item:
    """What slices see of a test."""

    nodeid: str
    path: pathlib.Path
    separable: bool

    def get_closest_marker(self, name: str) -> bool | None:
        assert name == "separable"
        return self.separable or None


def item(file: str, name: str, separable: bool = False) -> Item:
    return Item(f"tests/{file}::{name}", ROOT / "tests" / file, separable)


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> list[Item]:
    """Tests of 30 files with shared jobs, and of one function with a long test for each of 40 parameters."""
    monkeypatch.setattr(slicing, "SECONDS", {"data/b3_test.py": 200.0, "programs/a_test.py::test_long": 40.0})
    shared = [item(f"data/b{file}_test.py", f"test_{n}") for file in range(30) for n in range(4)]
    return [*shared[:60], *(item("programs/a_test.py", f"test_long[{n}]", True) for n in range(40)), *shared[60:]]


def slices(items: list[Item]) -> list[list[Item]]:
    return [slicing.select(items, number, PARTS) for number in range(1, PARTS + 1)]  # type: ignore[arg-type]


def test_each_test_is_in_one_slice(items):
    found = [one for each in slices(items) for one in each]
    assert len(found) == len(items)
    assert {*found} == {*items}


def test_the_tests_of_a_file_stay_together_unless_they_are_separable(items):
    for each in slices(items):
        files = {one.path for one in each if not one.separable}
        assert [one for one in each if one.path in files] == [
            one
            for path in dict.fromkeys(one.path for one in each if not one.separable)
            for one in items
            if one.path == path
        ]
    assert sum(any(one.separable for one in each) for each in slices(items)) >= PARTS - 1


def test_slices_take_about_as_long_and_begin_with_what_takes_longest(items):
    def seconds(each: list[Item]) -> list[float]:
        return [slicing.seconds_of(unit) for unit in slicing.units_of(each)]  # type: ignore[arg-type]

    totals = [sum(seconds(each)) for each in slices(items)]
    assert sum(totals) == 200 + 29 * 15 + 40 * 40
    assert max(totals) - min(totals) <= 40
    assert all(seconds(each) == sorted(seconds(each), reverse=True) for each in slices(items))


def test_what_has_seconds_is_there():
    for key in slicing.SECONDS:
        file, _, function = key.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not function or re.search(rf"^def {function}\(", text, re.MULTILINE), key


def test_the_number_of_slices_is_the_same_everywhere():
    [number] = re.findall(r"^slices=(\d+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    for name in ("Makefile", "BUILD.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert {*re.findall(r"SLICE=\d+/(\d+)", text), *re.findall(r"(?:third of|slice of) (\d+)", text)} == {number}, (
            name
        )


def test_reports_give_seconds_by_function_and_file(tmp_path):
    report = tmp_path / "1-of-20.xml"
    rows = [("test_a[x]@data/rows_test.py", 2), ("test_a[y]", 4), ("test_b@data/rows_test.py", 9)]
    cases = "".join(f'<testcase classname="tests.data.rows_test" name="{name}" time="{time}"/>' for name, time in rows)
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert slicing.measured([report]) == {
        "data/rows_test.py": (3, 5.0),
        "data/rows_test.py::test_a": (2, 3.0),
        "data/rows_test.py::test_b": (1, 9.0),
    }
