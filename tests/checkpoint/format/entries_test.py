"""Parts of tensors, and what an index says of them."""

import math

import numpy as np
import pytest

from tfdist.checkpoint.format import TensorBlock, files
from tfdist.checkpoint.format.entries import BlockEntry, Index, TensorEntry, check, merge_indices

SQUARE = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("w", (2, 2), (0, 0), SQUARE.astype(np.complex128)), "must have one of the dtypes bool, .*complex128"),
        (("w", (2, 2), (0, 0), SQUARE.astype(">f4")), "must have one of the dtypes .*>f4"),
        (("w", (2, 2), (0, 0), np.array([["a", "b"]] * 2)), "must have one of the dtypes"),
        (("w", (2, 2), (0, 0), SQUARE.astype(object)), "must have one of the dtypes"),
    ],
)
def test_what_cannot_be_stored_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        TensorBlock(*arguments)


FILE = "shard-00000.safetensors"


def part(offset: tuple[int, ...], shape: tuple[int, ...], file: str = FILE, key: str = "") -> BlockEntry:
    hashes = files.piece_count(math.prod(shape))  # elements of one byte
    return BlockEntry(file, key or f"{offset}{shape}", offset, shape, ("0" * 64,) * hashes)


def index(shape: tuple[int, ...], *parts: BlockEntry) -> Index:
    return Index({part.file: 8 for part in parts}, {"w": TensorEntry("int8", shape, parts)})


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((), [((), ())]),
        ((0, 3), []),
        ((0, 3), [((0, 0), (0, 3)), ((0, 1), (0, 1))]),
        ((4, 6), [((0, 0), (4, 6))]),
        ((4, 6), [((0, 0), (1, 6)), ((1, 0), (3, 6))]),
        ((4, 6), [((0, 0), (4, 2)), ((0, 2), (0, 4)), ((0, 2), (4, 4))]),
        # A pinwheel around the center, which no sequence of straight cuts can produce.
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]),
    ],
)
def test_blocks_that_have_each_element_once(shape, blocks):
    check(index(shape, *(part(*block) for block in blocks)))


@pytest.mark.parametrize(
    ("shape", "blocks", "words"),
    [
        ((), [], "do not have its number of elements, 1"),
        ((), [((), ()), ((), ())], "do not have its number of elements"),
        ((4,), [((0,), (2,))], "do not have its number of elements, 4"),
        ((4,), [((0,), (2,)), ((1,), (2,))], r"overlap at \(0,\)"),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (1, 4)), ((2, 0), (1, 4))], r"overlap at \(2, 0\)"),
        ((4, 4), [((0, 0), (3, 2)), ((0, 2), (2, 2)), ((2, 1), (2, 3))], "overlap"),
        ((4,), [((2,), (4,))], "outside of"),
        ((4,), [((0, 0), (2, 2))], "outside of"),
        ((0,), [((1,), (0,))], "outside of"),
    ],
)
def test_blocks_that_do_not_are_refused(shape, blocks, words):
    entries = [part(*block, key=str(number)) for number, block in enumerate(blocks)]
    with pytest.raises(ValueError, match=words):
        check(index(shape, *entries))


def test_what_several_ranks_wrote_is_one_index():
    first = index((4,), part((2,), (2,)))
    second = index((4,), part((0,), (2,), "shard-00001.safetensors"))
    whole = merge_indices([first, second])
    assert whole.shards == {FILE: 8, "shard-00001.safetensors": 8}
    assert [part.offset for part in whole.tensors["w"].parts] == [(0,), (2,)]
    check(whole)


def test_ranks_agree_about_a_tensor_and_their_files():
    one = index((4,), part((0,), (2,)))
    with pytest.raises(ValueError, match="two processes have written the shard shard-00000.safetensors"):
        merge_indices([one, one])
    for other in (TensorEntry("uint8", (4,), ()), TensorEntry("int8", (5,), ())):
        with pytest.raises(ValueError, match="blocks of w have different tensor specs, .* and "):
            merge_indices([one, Index({}, {"w": other})])
