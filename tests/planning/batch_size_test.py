"""Which batch sizes a search tries, and what it concludes."""

import pytest

from tfdist.errors import InputError
from tfdist.planning.batch_size import BatchSizes, search
from tfdist.planning.rate_curve import plot_batch_sizes
from tfdist.planning.trials import Trial

GIB = 2**30


def searched(first, largest, most=10**6, speed=float):
    """Returns the result for sizes of which those up to `largest` fit, and the sizes in the order of their trials."""
    tried = []

    def run(size):
        tried.append(size)
        fits = size <= largest
        return Trial(size, "" if fits else "more than 1.0 GiB", speed(size) if fits else 0.0, size)

    return search(run, first, lambda: most, GIB), tried


@pytest.mark.parametrize(
    ("first", "largest", "most", "tried"),
    [
        (64, 700, 10**6, [64, 128, 256, 512, 1024, 768, 640, 704]),
        (64, 64, 10**6, [64, 128]),
        (6, 13, 10**6, [6, 12, 24, 18]),
        (64, 10**9, 300, [64, 128, 256]),
        (64, 10**9, 10, [64]),
        (64, 20, 10**6, [64, 32, 16]),
        (24, 1, 10**6, [24, 12, 6, 3]),
        (1, 1, 10**6, [1, 2]),
        (1, 0, 10**6, [1]),
    ],
)
def test_sizes_are_doubled_refined_or_halved(first, largest, most, tried):
    result, order = searched(first, largest, most)
    assert order == tried
    assert [trial.batch_size for trial in result.trials] == sorted(tried)
    assert result.largest == max((size for size in tried if size <= largest), default=None)


def test_the_fastest_is_the_smallest_that_is_as_fast():
    speeds = {64: 100.0, 128: 190.0, 256: 196.0, 512: 150.0}
    result, _ = searched(64, 512, 512, speeds.__getitem__)
    assert result.fastest.batch_size == 128
    assert result.largest == 512
    assert result.describe() == (
        "All sizes fit into 1.0 GiB; the largest size tried is 512, of at most 512. Fastest: 128, with 190 examples/s."
    )
    assert result.to_json()["fastest"] == 128 and len(result.to_json()["trials"]) == 4


def test_what_is_said_about_sizes_that_do_not_fit():
    result, _ = searched(64, 100)
    assert result.describe() == "Largest that fits into 1.0 GiB: 64. Fastest: 64, with 64 examples/s."
    nothing, _ = searched(1, 0)
    assert nothing.describe() == "No batch size fits. The smallest, 1: more than 1.0 GiB."
    assert nothing.fastest is None and nothing.to_json()["largest"] is None


def test_halving_ends_at_a_size_that_the_devices_cannot_share():
    """The trials so far are the result, not an error about a size that nobody has given."""

    def run(size):
        if size == 3:
            raise InputError("--batch_size must be divisible by 2. Received: 3.")
        return Trial(size, "more than 1.0 GiB", 0.0, size)

    assert [trial.batch_size for trial in search(run, 6, lambda: 10, GIB).trials] == [6]


@pytest.mark.parametrize("trials", [[], [Trial(8, "more than 1.0 GiB", 0.0, GIB)], [Trial(8, "", 5.0, 99)]])
def test_the_picture_of_any_result(trials):
    assert plot_batch_sizes(BatchSizes(trials, GIB, 8), "$ title").startswith(b"\x89PNG")
