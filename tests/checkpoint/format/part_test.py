import numpy as np
import pytest

from tfdist.checkpoint.format import Part

SQUARE = np.ones((2, 2), np.float32)


def test_a_whole_tensor_is_its_one_part():
    part = Part.full("w", SQUARE)
    assert (part.shape, part.offset, part.key) == ((2, 2), (0, 0), "w")


def test_a_block_is_named_by_its_slices():
    assert Part("w", (4, 2), (2, 0), SQUARE).key == "w[2:4,0:2]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("w", (2, 2), (0, 0), SQUARE.astype(np.complex128)), "must have one of the types bool, .*complex128"),
        (("w", (2, 2), (0, 0), SQUARE.astype(">f4")), "must have one of the types .*>f4"),
        (("w", (2, 2), (0, 0), np.array([["a", "b"]] * 2)), "must have one of the types"),
        (("w", (2, 2), (0, 0), SQUARE.astype(object)), "must have one of the types"),
        (("w", (2, 3), (0, 0), np.ones((3, 2)).T), "must be C-contiguous"),
        (("w", (3, 2), (2, 0), SQUARE), r"must be inside it\. Received: \(2, 2\) at \(2, 0\) of \(3, 2\)"),
        (("w", (3, 2), (-1, 0), SQUARE), "must be inside it"),
        (("w", (3, 2), (0,), SQUARE), "must be inside it"),
        (("w", (4,), (0,), SQUARE), "must be inside it"),
        (("__metadata__", (2, 2), (0, 0), SQUARE), "__metadata__"),
    ],
)
def test_what_is_no_block_of_a_tensor_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Part(*arguments)
