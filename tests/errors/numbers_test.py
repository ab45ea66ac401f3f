"""Numbers in texts, with their units or nouns, and in arguments, also NumPy's."""

import numpy as np
import pytest

from tfdist.errors import byte_size, count_of, is_integer, is_number


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (40 * 2**20, "40.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_are_in_the_unit_that_suits_them(count, text):
    assert byte_size(count) == text


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


@pytest.mark.parametrize(
    "values, integer, number",
    [
        ([3, -1, np.int64(3), np.uint8(0)], True, True),
        ([0.5, np.float32(0.5), np.float64(1)], False, True),
        ([True, np.bool_(True), "3", None, 1j, [3]], False, False),
    ],
)
def test_integers_and_numbers(values, integer, number):
    for value in values:
        assert (is_integer(value), is_number(value)) == (integer, number), value
