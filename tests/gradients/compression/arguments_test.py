"""Integer parameters."""

import pytest

from tfdist.errors import InputError
from tfdist.gradients.compression.arguments import checked_integer


@pytest.mark.parametrize("value", [2, 8])
def test_bounds_are_included(value):
    assert checked_integer("int8", "bits", value, 2, 8) == value


@pytest.mark.parametrize("value", [1, 9, 4.0, "4", True, None])
def test_others_are_refused(value):
    with pytest.raises(InputError, match="int8 needs bits to be a whole number from 2 to 8. Received: .*bits=2"):
        checked_integer("int8", "bits", value, 2, 8)


def test_multiples():
    assert checked_integer("onebit", "block", 24, 8, 100, multiple=8) == 24
    with pytest.raises(InputError, match="a multiple of 8 from 8 to 100. Received: 20"):
        checked_integer("onebit", "block", 20, 8, 100, multiple=8)
