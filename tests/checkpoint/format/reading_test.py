import tracemalloc

import numpy as np
import pytest

from tests.checkpoint.damaging import flip_last
from tfdist.checkpoint.format import Checkpoint, CorruptCheckpointError, TensorBlock, files
from tfdist.checkpoint.format.files import DTYPES


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    found = {f"of/{name}": random.integers(0, 2, (3, 5)).astype(dtype) for name, dtype in DTYPES.items()}
    found["not finite"] = np.array([np.nan, np.inf, -0.0], np.float32)
    found["scalar"] = np.array(7, np.int64)
    found["empty"] = np.zeros((0, 3), np.float64)
    found["many pieces"] = random.integers(0, 256, 2 * files.PIECE_BYTES + 5).astype(np.uint8)
    found["of one piece"] = random.integers(0, 256, files.PIECE_BYTES).astype(np.uint8)
    return found


def blocks(whole: np.ndarray, rows: list[int], columns: list[int], name: str = "w") -> list[TensorBlock]:
    """Returns the blocks of a matrix that is cut at these rows and columns."""
    return [
        TensorBlock(name, whole.shape, (top, left), np.ascontiguousarray(whole[top:bottom, left:right]))
        for top, bottom in zip([0, *rows], [*rows, len(whole)], strict=True)
        for left, right in zip([0, *columns], [*columns, whole.shape[1]], strict=True)
    ]


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def test_what_was_written_comes_back_bit_for_bit(arrays, tmp_path, write):
    path = write(tmp_path, [TensorBlock.full(name, values) for name, values in arrays.items()], step=7, seed=-3)
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.step, checkpoint.seed) == (7, -3)
    assert (checkpoint.flags, checkpoint.values) == ({"batch_size": 64}, {"examples": 7680})
    assert checkpoint.tensors.keys() == arrays.keys()
    for name, values in arrays.items():
        assert_same(checkpoint.read(name), values)


WHOLE = np.arange(56, dtype=np.int32).reshape(7, 8)
CUTS = {
    "whole": blocks(WHOLE, [], []),
    "rows": blocks(WHOLE, [1, 4], []),
    "columns": blocks(WHOLE, [], [3, 7]),
    "both": blocks(WHOLE, [2, 6], [1, 5]),
    "no grid": [*blocks(WHOLE, [3], [2])[:2], *(TensorBlock("w", WHOLE.shape, (3, 0), WHOLE[3:]),)],
    "with nothing": blocks(WHOLE, [3, 3], [8]),
}


@pytest.mark.parametrize("cut", CUTS)
def test_blocks_are_put_together_and_cut_otherwise(cut, tmp_path, write):
    checkpoint = Checkpoint.open(write(tmp_path, CUTS[cut]))
    assert_same(checkpoint.read("w"), WHOLE)
    for offset, shape in [((0, 0), (7, 8)), ((1, 2), (4, 5)), ((6, 7), (1, 1)), ((2, 0), (3, 8)), ((3, 3), (0, 2))]:
        (top, left), (rows, columns) = offset, shape
        assert_same(checkpoint.read_block("w", offset, shape), WHOLE[top : top + rows, left : left + columns])


def test_a_block_lies_in_its_tensor(tmp_path, write):
    checkpoint = Checkpoint.open(write(tmp_path, CUTS["whole"]))
    for offset, shape in [((0, 0), (8, 8)), ((-1, 0), (1, 1)), ((0,), (1,)), ((0, 0), (-1, 1)), ((0, 8), (1, 1))]:
        with pytest.raises(ValueError, match="A block of w must be inside the tensor"):
            checkpoint.read_block("w", offset, shape)


def test_only_parts_that_a_block_needs_are_read(tmp_path, write):
    path = write(tmp_path, CUTS["rows"])
    flip_last(path / "shard-00000.safetensors")  # in the last rows
    checkpoint = Checkpoint.open(path)
    assert_same(checkpoint.read_block("w", (0, 0), (4, 8)), WHOLE[:4])
    with pytest.raises(
        CorruptCheckpointError, match=r"shard-00000.safetensors: the hash of w\[4:7,0:8\] does not match"
    ):
        checkpoint.read_block("w", (3, 0), (2, 8))


def test_verifying_reads_what_was_not_read(tmp_path, write):
    path = write(tmp_path, [TensorBlock.full("a", WHOLE), TensorBlock.full("b", WHOLE)])
    checkpoint = Checkpoint.open(path)
    checkpoint.read("b")
    flip_last(path / "shard-00000.safetensors")
    checkpoint.verify()
    with pytest.raises(CorruptCheckpointError, match="the hash of b does not match"):
        Checkpoint.open(path).verify()


def test_what_is_not_read_takes_no_memory(tmp_path, write):
    size = 64 << 20
    checkpoint = Checkpoint.open(write(tmp_path, [TensorBlock.full("large", np.ones(size, np.uint8))]))
    before = _allocated_at_most(lambda: None)
    assert _allocated_at_most(checkpoint.verify) - before < size // 8


def _allocated_at_most(call) -> int:
    tracemalloc.start()
    call()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most
