"""Selects the parameters of a test that `make test` runs, and those of `make conformance`, which runs the others."""

import heapq
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=tuple[Hashable, ...])  # a value of each factor


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Returns parameters for `pytest.mark.parametrize`: the chosen values, and the others marked as `full`."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.full) for value in values]


def cover(possible: Iterable[Case], strength: int) -> list[Case]:
    """Returns a covering set: few of the possible cases, with the interactions of all of them.

    Any `strength` values, each of another factor, that some possible case has together are in one of the returned cases. For a
    strength of 2 it is a pairwise cover.

    Args:
      possible: all cases; those that cannot be run are left out.
      strength: number of factors that may interact.

    Returns:
      The chosen cases, in the order of `possible`; the same ones in every process.
    """
    cases = list(possible)
    left = set(itertools.chain.from_iterable(_interactions(case, strength) for case in cases))
    # What a case adds only decreases, so that the first of the heap is the best if it is up to date.
    heap = [(-len([*_interactions(case, strength)]), number) for number, case in enumerate(cases)]
    heapq.heapify(heap)
    chosen = []
    while left:
        expected, number = heapq.heappop(heap)
        new = left.intersection(_interactions(cases[number], strength))
        if len(new) == -expected:
            chosen.append(number)
            left -= new
        elif new:
            heapq.heappush(heap, (-len(new), number))
    return [cases[number] for number in sorted(chosen)]


def uncovered(
    cases: Iterable[tuple[Hashable, ...]], possible: Iterable[tuple[Hashable, ...]], strength: int
) -> set[Any]:
    """Returns the interactions of `strength` values in the possible cases that are in none of the cases; see `cover`."""
    found, wanted = (
        {interaction for case in some for interaction in _interactions(case, strength)} for some in (cases, possible)
    )
    return wanted - found


def _interactions(case: Sequence[Hashable], strength: int) -> Iterator[tuple[tuple[int, Hashable], ...]]:
    """Yields all combinations of some values of a case, with the numbers of their factors."""
    return itertools.combinations(enumerate(case), strength)
