import copy
import hashlib
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdist.checkpoint.format import Checkpoint, CorruptCheckpointError, TensorBlock, manifest
from tfdist.errors import InputError


@pytest.fixture(scope="module")
def path(tmp_path_factory, write) -> Path:
    """A checkpoint of two tensors, with `w` in four blocks."""
    corners = [(row, column) for row in (0, 2) for column in (0, 3)]
    parts = [TensorBlock("w", (4, 6), corner, np.full((2, 3), sum(corner), np.float32)) for corner in corners]
    return write(tmp_path_factory.mktemp("checkpoints"), [*parts, TensorBlock.full("b", np.arange(4))])


@pytest.fixture(scope="module")
def content(path) -> dict[str, Any]:
    return manifest.load_with_hash((path / "manifest.json").read_bytes())


@pytest.fixture
def sealing(path):
    """Returns a function that replaces the manifest by one with a valid hash and any contents; restores the original."""
    file = path / "manifest.json"
    data = file.read_bytes()

    def seal(changed: Any) -> Path:
        file.write_bytes(manifest.dump_with_hash(changed))
        return path

    yield seal
    file.write_bytes(data)


def load(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.tensors:
        checkpoint.read(name)
    checkpoint.verify()


Place = tuple[str | int, ...]


def changed(content: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    """Returns a copy with another value at a place."""
    made = copy.deepcopy(content)
    *before, last = place
    inner: Any = made
    for step in before:
        inner = inner[step]
    inner[last] = value
    return made


def test_it_is_loaded_as_it_is(content, sealing):
    load(sealing(content))


def test_every_byte_of_it_is_one_that_it_must_be(content):
    data = manifest.dump_with_hash(content)
    assert manifest.load_with_hash(data) == content
    for other in (data.replace(b",", b", ", 1), data.strip(), data + b"\n", data.replace(b'"step"', b'"ste\\u0070"')):
        with pytest.raises(ValueError, match="do not match its own hash"):
            manifest.load_with_hash(other)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\xff", b"{}", b"[]", b"null", b"7", b'"x"', b'{"sha256":7}', b"[" * 100_000, b"9" * 5000, b"NaN"],
)
def test_what_is_no_manifest_is_damage(data, tmp_path):
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="manifest.json: its contents do not match its own hash"):
        Checkpoint.open(tmp_path)


def test_a_newer_version_is_no_damage(content, sealing):
    with pytest.raises(InputError, match="up to format version 1. Received: .* with format version 2."):
        load(sealing({"version": 2, "what": "is not known yet"}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"bytes", np.float32(1)])
def test_what_is_no_json_is_refused_when_it_is_written(value, content):
    with pytest.raises((ValueError, TypeError)):
        manifest.dump_with_hash({"values": value})


HUGE = 2**62
PART = "tensors w parts 0"
REFUSED = {
    "version": [0, -1, "1", 1.0, True, None],
    "step": [-1, 1.5, True, 2**63, "120", None],
    "seed": [1.0, False, "1", None],
    "flags": [[], None, "x"],
    "unknown": [1],
    "shards": [{}, [], None, {"shard-00000.safetensors": 8}],
    "shards shard-00000.safetensors": [0, 8, -1, HUGE, "304", True],
    "shards shard-00001.safetensors": [0, 100],
    "shards ../shard-00000.safetensors": [100],
    "tensors": [{}, [], None],
    "tensors w": [None, [], {}],
    "tensors new": [
        {"dtype": "int8", "shape": shape, "parts": []}
        for shape in ([HUGE], [], [0, HUGE, HUGE], [0] * 33)  # the last two have no bytes
    ],
    "tensors w dtype": ["float64", "int32", "float31", "object", "O", "", 7, None, ["float32"], "float32x"],
    "tensors w shape": [[4], [4, 6, 1], [6, 4], [24], [HUGE, 6], [2**63, 1], [-4, -6], [4.0, 6], [True, 6], "46", None]
    + [[0, HUGE, HUGE], [0] * 33, [1] * 100_000, [2**60] * 1000],
    "tensors w parts": [None, {}, [], [None], [[]]],
    f"{PART} file": ["/etc/passwd", "../shard-00000.safetensors", "shard-00001.safetensors", "manifest.json", "", None]
    + ["shard-00000.safetensors\n", "shard-00000.safetensors/", "./shard-00000.safetensors", "shard-٠٠٠٠٠.safetensors"],
    f"{PART} key": ["w", "b", "w[0:2,3:6]", "__metadata__", 7, None, "\ud800"],
    f"{PART} offset": [[0, 3], [1, 0], [0, 1], [3, 0], [-1, 0], [0], [0, 0, 0], None]
    + [[HUGE, 0], [2**63, 0], [0, False]],
    f"{PART} shape": [[2, 2], [2, 4], [3, 2], [0, 0], [-2, -3], [6], [1, 6], [HUGE, HUGE], [2, None], None],
    f"{PART} sha256": [[], ["0" * 64], ["0" * 63], ["x" * 64], [None], "0" * 64, None, ["0" * 64] * 2],
    f"{PART} more": [1],
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in REFUSED.items() for value in values])
def test_what_cannot_be_is_refused_although_its_own_hash_is_right(place, value, content, sealing):
    steps = tuple(int(step) if step.isdigit() else step for step in place.split())
    with pytest.raises(CorruptCheckpointError) as caught:
        load(sealing(changed(content, steps, value)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def places(value: Any) -> list[Place]:
    """Returns the paths of all values in a JSON structure."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, one in inner for place in ((key,), *((key, *below) for below in places(one)))]


NUMBERS = st.integers() | st.sampled_from([0, 1, -1, 2, 3, 4, 6, 2**31, 2**62, 2**63, 2**64, 10**30])
LEAVES = st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
NAMES = st.sampled_from(["w", "b", "float32", "bool", "shard-00000.safetensors", "/etc/passwd", "..", "file", "shape"])
ANYTHING = st.recursive(
    LEAVES | NAMES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=5), inner)
)


@pytest.mark.fuzz
@settings(max_examples=max(250, settings().max_examples), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_it_says_it_is_loaded_as_written_or_refused(data, content, sealing):
    made = copy.deepcopy(content)
    for _ in range(data.draw(st.integers(1, 3))):
        made = changed(made, data.draw(st.sampled_from(places(made))), data.draw(ANYTHING))
    told = ("step", "seed", "flags", "values")  # not determined by the rest of the checkpoint
    tracemalloc.start()
    try:
        load(sealing(made))
    except (CorruptCheckpointError, InputError) as error:
        assert "\n" not in str(error)
    else:
        empty = {"shards": {}, "tensors": {}}  # refers to no file, so that nothing is loaded
        as_written = {key: value for key, value in content.items() if key not in told}
        as_written |= empty if {**made, **empty} == made else {}
        assert {key: value for key, value in made.items() if key not in told} == as_written
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 20e6


def test_what_is_in_it(content):
    assert content.keys() == {"version", "step", "seed", "flags", "values", "shards", "tensors"}
    b = content["tensors"]["b"]
    assert (b["dtype"], b["shape"]) == ("int64", [4])
    expected = hashlib.sha256(np.arange(4).tobytes()).hexdigest()
    place = {"file": "shard-00000.safetensors", "key": "b", "offset": [0], "shape": [4]}
    assert b["parts"] == [place | {"sha256": [expected]}]
