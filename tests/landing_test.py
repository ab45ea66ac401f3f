"""Landings are told apart by the hours between them, and take turns through all parts."""

import re

import pytest

from tests import landing

HOUR = 3600


def test_commits_within_an_hour_are_one_landing():
    times = [0, 10, HOUR + 10, 3 * HOUR, 3 * HOUR + 5, 9 * HOUR]
    assert landing.first_commits(times) == [0, 3, 5]
    assert landing.first_commits([7]) == [0]


@pytest.mark.parametrize("parts", [landing.SLOW_PARTS, landing.CONFORMANCE_PARTS])
def test_successive_landings_run_all_parts(parts: int):
    assert sorted(landing.due(number, parts) for number in range(60, 60 + parts)) == sorted(
        f"{number}/{parts}" for number in range(1, parts + 1)
    )


def test_the_number_of_slices_is_the_same_everywhere():
    for name in ("Makefile", "BUILD.md"):
        text = (landing.ROOT / name).read_text(encoding="utf-8")
        found = {*re.findall(r"SLICE=\d+/(\d+)", text), *re.findall(r"(?:third of|slice of) (\d+)", text)}
        assert found == {str(landing.CONFORMANCE_PARTS)}, name
