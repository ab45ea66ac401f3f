"""Covering sets of cases have all interactions of the product, and are much smaller."""

import itertools

import pytest

from tests.selection import cover, uncovered

FACTORS = ("ABCDEF", "pqrs", "xyz", "01")
PRODUCT = [*itertools.product(*FACTORS)]


@pytest.mark.parametrize(("strength", "most"), [(2, 27), (3, 80)])  # at least 24 and 72, of 144
def test_any_values_are_in_a_case(strength: int, most: int):
    found = cover(PRODUCT, strength)
    for places in itertools.combinations(range(4), strength):
        seen = {tuple(one[i] for i in places) for one in found}
        assert seen == {*itertools.product(*(FACTORS[i] for i in places))}
    assert len(found) <= most


def test_what_is_missing_is_found():
    found = cover(PRODUCT, 2)
    assert not uncovered(found, PRODUCT, 2)
    without = [one for one in found if one[:2] != ("C", "r")]
    assert uncovered(without, PRODUCT, 2) >= {((0, "C"), (1, "r"))}
    assert uncovered(found, PRODUCT, 3)
