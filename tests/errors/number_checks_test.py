"""Integers and numbers in arguments, also NumPy's."""

import numpy as np
import pytest

from tfdist.errors.number_checks import is_integer, is_number


@pytest.mark.parametrize("value", [3, -1, np.int64(3), np.uint8(0)])
def test_integers_are_numbers(value):
    assert is_integer(value) and is_number(value)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float64(1)])
def test_other_numbers(value):
    assert is_number(value) and not is_integer(value)


@pytest.mark.parametrize("value", [True, np.bool_(True), "3", None, 1j, [3]])
def test_others_are_neither(value):
    assert not is_integer(value) and not is_number(value)
