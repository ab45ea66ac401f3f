"""The schedule by which batches are compared over processes; wrong_use_test.py shows it with real processes."""

from typing import Any

import pytest

from tfdist.errors import InputError
from tfdist.keras_fit.batch_comparison import COMPARE_EVERY, BatchComparison, next_comparison


class TwoProcesses:
    """A strategy whose other process has read the same batches, except for those that it is given."""

    def __init__(self, size: int = 2, wrong: Any = ()):
        self.cluster = self.peers = self
        self.size = size
        self.wrong = wrong
        self.names: list[str] = []

    def gather(self, name: str, value: str, deadline: float) -> list[str]:
        self.names.append(name)
        return [value, "other" if self.wrong else value]


def compared(strategy: TwoProcesses, calls: list[int], length: int) -> list[int]:
    """Returns after how many batches there was a comparison, given the number of batches that each call takes."""
    comparison = BatchComparison(dict.fromkeys(range(length), 7), strategy, "fit 1/1", 60)  # type: ignore[arg-type]
    taken, found = 0, []
    for count in calls:
        taken += count
        before = len(strategy.names)
        comparison.took(taken, ends=taken == length)
        found += [taken] * (len(strategy.names) - before)
    assert comparison._checksums == {}
    return found


def test_distances_double_up_to_the_maximum() -> None:
    found = [0]
    while found[-1] < 400:
        found.append(next_comparison(found[-1]))
    assert found == [0, 1, 2, 4, 8, 16, 32, 64, 128, 228, 328, 428]
    assert COMPARE_EVERY == 100


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([1] * 10, [1, 2, 4, 8, 10]),
        ([1], [1]),
        ([1] * 300, [1, 2, 4, 8, 16, 32, 64, 128, 228, 300]),
        ([10] * 30, [10, 20, 40, 80, 160, 260, 300]),  # once for each call at most
        ([300], [300]),
    ],
    ids=["one by one", "a single batch", "many", "several per call", "all in one call"],
)
def test_the_end_of_a_pass_is_compared(calls: list[int], expected: list[int]) -> None:
    strategy = TwoProcesses()
    assert compared(strategy, calls, sum(calls)) == expected
    assert len(set(strategy.names)) == len(expected)


def test_one_process_compares_nothing() -> None:
    comparison = BatchComparison({}, TwoProcesses(size=1), "fit 1/1", 60)  # type: ignore[arg-type]
    comparison.took(10, ends=True)
    comparison.ended()


def test_it_names_the_batches() -> None:
    strategy = TwoProcesses()
    comparison = BatchComparison(dict.fromkeys(range(6), 7), strategy, "fit 1/1", 60)  # type: ignore[arg-type]
    comparison.took(3, ends=False)
    strategy.wrong = True
    comparison.took(4, ends=False)
    with pytest.raises(InputError, match=r"between the 2 processes in batches 3 to 5 of fit 1/1\. Call keras"):
        comparison.ended()
    with pytest.raises(InputError, match=r"between the 2 processes in batch 0 of fit 1/1\. Call keras"):
        BatchComparison({0: 7}, strategy, "fit 1/1", 60).took(1, ends=True)  # type: ignore[arg-type]
