"""Reports of pytest become seconds of units: at the speed of the first machine, and without noise."""

import pytest

from tests import durations, tiers

PROPERTY = '<properties><property name="unit" value="data/rows_test.py"/></properties>'
FILE = "config/spec_test.py"  # a file that is there, with a test that is there


def report(*cases: tuple[str, str, float, str]) -> str:
    rows = (f'<testcase classname="tests.{c}" name="{n}" time="{t}">{p}</testcase>' for c, n, t, p in cases)
    return f"<testsuites><testsuite>{''.join(rows)}</testsuite></testsuites>"


def test_the_newest_report_of_a_test_counts(tmp_path):
    old, new = tmp_path / "old.xml", tmp_path / "new.xml"
    old.write_text(report(("data.rows_test", "test_a[x@y]", 2.0, ""), ("main_test.TestMain", "test_b", 1.0, "")))
    new.write_text(report(("data.rows_test", "test_a[x@y]@data/rows_test.py", 3.0, PROPERTY)))
    tests = durations.read([new, old])
    assert {*tests} == {
        ("data/rows_test.py::test_a[x@y]", "data/rows_test.py", 3.0),
        ("main_test.py::TestMain::test_b", "main_test.py::TestMain::test_b", 1.0),
    }


@pytest.fixture
def functions() -> list[str]:
    """Units of functions that are there."""
    text = (tiers.TESTS / FILE).read_text(encoding="utf-8").splitlines()
    return [f"{FILE}::{line[4:].partition('(')[0]}" for line in text if line.startswith("def test_")][:4]


def test_seconds_are_those_of_the_first_machine_and_change_if_they_differ_by_more_than_half(functions):
    same, faster, kept, new = functions
    old = {same: 1.0, faster: 4.0, kept: 9.0, f"{FILE}::test_that_is_gone": 7.0, "data/gone_test.py": 5.0}
    # A machine twice as fast; the noise of 1.2 is ignored.
    measured = {same: 0.6, faster: 0.5, new: 1.5, FILE: 0.09}
    tests = [durations.Test(unit, unit, seconds) for unit, seconds in measured.items()]
    tests += [durations.Test(f"{n}", same, 0.0) for n in range(3)]  # tests of a unit add up
    speed = (1.0 / 0.6 + 4.0 / 0.5) / 2  # the median of two ratios
    assert durations.merged(old, tests) == pytest.approx(
        {same: 0.6 * speed, faster: 0.5 * speed, kept: 9.0, new: 1.5 * speed, FILE: 0.09 * speed}
    )


def test_what_is_written_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "SECONDS", tmp_path / "seconds.tsv")
    assert tiers.read_seconds() == {}
    durations.write({"a_test.py::test_a[x y]": 1.25, "b_test.py": 30.0})
    assert tiers.read_seconds() == {"a_test.py::test_a[x y]": 1.2, "b_test.py": 30.0}
