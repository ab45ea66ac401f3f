"""Landings are told apart by the hours between them; the parts of the slow tests take turns with time."""

import re

import pytest

from tests import landing

HOUR = 3600


def test_commits_within_an_hour_are_one_landing():
    times = [0, 10, HOUR + 10, 3 * HOUR, 3 * HOUR + 5, 9 * HOUR]
    assert landing.first_commits(times) == [0, 3, 5]
    assert landing.first_commits([7]) == [0]


@pytest.mark.parametrize("parts", [landing.SLOW_PARTS, landing.CONFORMANCE_PARTS])
def test_all_parts_are_due_in_turn(parts: int):
    due = [landing.due(1_800_000_000 + turn * 3 * HOUR, parts) for turn in range(parts)]
    assert sorted(due) == sorted(f"{number}/{parts}" for number in range(1, parts + 1))


def test_the_number_of_slices_is_the_same_everywhere():
    for name in ("Makefile", "BUILD.md"):
        text = (landing.ROOT / name).read_text(encoding="utf-8")
        found = {*re.findall(r"SLICE=\d+/(\d+)", text), *re.findall(r"(?:third of|slice of) (\d+)", text)}
        assert found == {str(landing.CONFORMANCE_PARTS)}, name
