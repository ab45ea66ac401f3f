import pytest

from tfdist.errors.counts import count_of


@pytest.mark.parametrize(
    ("number", "name", "expected"),
    [
        (0, "step", "0 steps"),
        (1, "replica", "1 replica"),
        (1200, "step", "1,200 steps"),
        (1, "micro-batch", "1 micro-batch"),
        (8, "micro-batch", "8 micro-batches"),
        (2, "process", "2 processes"),
        (20, "epoch", "20 epochs"),
    ],
)
def test_names_are_singular_or_plural(number: int, name: str, expected: str) -> None:
    assert count_of(number, name) == expected
