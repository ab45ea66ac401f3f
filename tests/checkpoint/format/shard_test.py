import json
import threading

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from tfdist.checkpoint.format import TensorBlock, files, shard, write_shard
from tfdist.checkpoint.format.files import DTYPES
from tfdist.checkpoint.format.shard import shard_name

RANDOM = np.random.default_rng(0)
BY_TYPE = {name: RANDOM.integers(0, 2, (3, 5)).astype(dtype) for name, dtype in DTYPES.items()}
# The safetensors package knows these names but has no NumPy types for them.
WITHOUT_NUMPY = {"float8_e4m3fn", "float8_e5m2"}


def test_the_package_safetensors_reads_every_type(tmp_path):
    parts = [TensorBlock.full(name, values) for name, values in BY_TYPE.items()]
    parts += [TensorBlock.full("scalar", np.array(2.5)), TensorBlock.full("empty", np.zeros((2, 0), np.int8))]
    write_shard(tmp_path, 0, parts)
    path = tmp_path / shard_name(0)
    raw = dict(safetensors.deserialize(path.read_bytes()))
    assert raw.keys() == {part.name for part in parts}
    with safetensors.safe_open(path, "np") as file:
        for part in parts:
            assert bytes(raw[part.name]["data"]) == part.values.tobytes()
            assert tuple(raw[part.name]["shape"]) == part.shape
            if part.name not in WITHOUT_NUMPY:
                found = file.get_tensor(part.name)
                assert (found.dtype, found.tobytes()) == (part.values.dtype, part.values.tobytes())


def test_the_names_of_types_are_the_packages(tmp_path):
    write_shard(tmp_path, 0, [TensorBlock.full(name, values) for name, values in BY_TYPE.items()])
    ours = dict(safetensors.deserialize((tmp_path / shard_name(0)).read_bytes()))
    theirs = dict(safetensors.deserialize(safetensors.numpy.save(BY_TYPE)))
    assert {name: ours[name]["dtype"] for name in ours} == {name: theirs[name]["dtype"] for name in theirs}


def test_a_name_may_be_any_text(tmp_path):
    names = ['a "b"\n\\', "käse/0", "", "x" * 1000]
    write_shard(tmp_path, 12, [TensorBlock.full(name, np.arange(3)) for name in names])
    assert safetensors.numpy.load_file(tmp_path / "shard-00012.safetensors").keys() == set(names)


def test_every_block_begins_at_a_multiple_of_its_elements_size(tmp_path):
    parts = [TensorBlock.full(name, np.ones(3, dtype)) for name, dtype in DTYPES.items()]
    index = write_shard(tmp_path, 0, parts)
    plan = shard.plans(index)[shard_name(0)]
    assert len(plan.header) % 8 == 0
    assert not [part.name for part in parts if plan.positions[part.name] % part.values.itemsize]
    assert index.shards == {shard_name(0): plan.size} == {shard_name(0): (tmp_path / shard_name(0)).stat().st_size}
    assert (tmp_path / shard_name(0)).read_bytes().startswith(plan.header)


def test_blocks_are_named_by_their_slices(tmp_path):
    values = np.arange(6).reshape(2, 3)
    parts = [TensorBlock("w", (4, 3), (row, 0), values + row) for row in (0, 2)]
    index = write_shard(tmp_path, 3, [*parts, TensorBlock.full("b", values)])
    found = safetensors.numpy.load_file(tmp_path / shard_name(3))
    assert found["w[2:4,0:3]"].tolist() == (values + 2).tolist()
    assert found.keys() == {"w[0:2,0:3]", "w[2:4,0:3]", "b"}
    assert [part.key for part in index.tensors["w"].parts] == ["w[0:2,0:3]", "w[2:4,0:3]"]
    with pytest.raises(ValueError, match="Blocks must have unique keys. Received twice: a"):
        write_shard(tmp_path, 0, [TensorBlock.full(name, np.ones(2)) for name in "aba"])


def test_other_threads_run_while_it_writes(tmp_path):
    parts = [TensorBlock.full("large", np.ones(48 * files.PIECE_BYTES, np.uint8))]

    def turns(number: int) -> int:
        """Returns the number of turns of another thread meanwhile."""
        count, stop = [], threading.Event()

        def tick() -> None:
            while not stop.wait(0.001):
                count.append(1)

        ticking = threading.Thread(target=tick)
        ticking.start()
        write_shard(tmp_path, number, parts)
        stop.set()
        ticking.join()
        return len(count)

    # Hashing 200 MB takes at least 80 ms; a writer that holds the GIL would leave time for one or two turns. Other programs of
    # a loaded machine may delay that thread, too.
    assert any(turns(number) > 15 for number in range(5))


def test_the_header_is_json_in_the_order_of_the_file(tmp_path):
    write_shard(tmp_path, 0, [TensorBlock.full("b", np.ones(2, np.int8)), TensorBlock.full("a", np.ones(2))])
    data = (tmp_path / shard_name(0)).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header == {
        "a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]},
        "b": {"dtype": "I8", "shape": [2], "data_offsets": [16, 18]},
    }
    assert list(header) == ["a", "b"]
