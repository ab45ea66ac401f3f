"""Covering sets of cases have all interactions of the product, and are much smaller."""

import itertools

from tests.selection import cover, uncovered

FACTORS = ("ABCDEF", "pqrs", "xyz", "01")
PRODUCT = [*itertools.product(*FACTORS)]


def test_any_two_values_are_in_a_case():
    found = cover(PRODUCT, 2)
    for i, j in itertools.combinations(range(4), 2):
        assert {(one[i], one[j]) for one in found} == {*itertools.product(FACTORS[i], FACTORS[j])}
    assert len(found) <= 27  # at least 24


def test_any_three_values_are_in_a_case():
    found = cover(PRODUCT, 3)
    for places in itertools.combinations(range(4), 3):
        seen = {tuple(one[i] for i in places) for one in found}
        assert seen == {*itertools.product(*(FACTORS[i] for i in places))}
    assert len(found) <= 80  # at least 72, of 144


def test_only_possible_cases_are_chosen_in_their_order():
    possible = [one for one in PRODUCT if one[0] != "A" or one[1] == "p"]
    found = cover(possible, 2)
    assert found == [one for one in possible if one in found]
    assert ("A", "p") in {one[:2] for one in found}


def test_what_is_missing_is_found():
    found = cover(PRODUCT, 2)
    assert not uncovered(found, PRODUCT, 2)
    without = [one for one in found if one[:2] != ("C", "r")]
    assert uncovered(without, PRODUCT, 2) >= {((0, "C"), (1, "r"))}
    assert uncovered(found, PRODUCT, 3)
