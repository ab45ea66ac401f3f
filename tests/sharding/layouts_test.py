"""Meshes and layouts of tensors on them."""

import pytest

from tfdist.errors import InputError
from tfdist.sharding.layouts import Layout, Shard, laid_out, parse_layout, placed, split_rules
from tfdist.sharding.mesh import Mesh, mesh_of, parse_mesh


def test_axes_keep_their_order():
    mesh = parse_mesh(" data:2; model : 4;")
    assert list(mesh.axes.items()) == [("data", 2), ("model", 4)]
    assert mesh.size == 8
    assert str(mesh) == "data:2;model:4"


@pytest.mark.parametrize(
    ("text", "received"),
    [
        ("data=2", "'data=2' in 'data=2'"),
        ("data:2,model:2", "'data:2,model:2'"),
        ("data:-1", "'data:-1'"),
        ("data:x", "'data:x'"),
        ("2:data", "'2:data'"),
        ("data:2;data:2", "data twice"),
        ("data:2;model:0", "'model:0'"),
        (";", "no axis in ';'"),
        ("data:2;unsharded:2", "'unsharded:2' in"),
        ("any:4", "'any:4' in"),
        ("data:256;model:512", "131072 in"),
    ],
)
def test_refuses_what_is_no_mesh(text, received):
    with pytest.raises(InputError, match="^A mesh is a list of NAME:SIZE separated by ;.*Received: ") as raised:
        parse_mesh(text)
    assert received in str(raised.value)


def test_offers_the_nearest_axis():
    with pytest.raises(InputError, match="The mesh data:2;model:4 has no axis modle. Did you mean .*model"):
        parse_mesh("data:2;model:4").size_of("modle")


@pytest.mark.parametrize(
    ("shape", "devices", "processes", "axes"),
    [
        ("", 0, 1, {"data": 1}),
        ("", 4, 1, {"data": 4}),
        ("", 2, 3, {"data": 6}),
        ("a:2;b:2", 0, 1, {"a": 2, "b": 2}),
        ("a:2;b:2", 2, 2, {"a": 2, "b": 2}),
    ],
)
def test_what_flags_ask_for(shape, devices, processes, axes):
    assert mesh_of(shape, devices, processes) == Mesh(axes)


def test_places_and_devices_must_agree():
    with pytest.raises(InputError, match="--mesh_shape=a:2;b:2, of size 4, --devices=3. Change one"):
        mesh_of("a:2;b:2", 3)
    with pytest.raises(InputError, match="--devices=4 on each of 2 processes"):
        mesh_of("a:2;b:2", 4, 2)
    with pytest.raises(InputError, match="--mesh_shape=a:2;b:2, of size 4, and 3 processes"):
        mesh_of("a:2;b:2", 0, 3)


MESH = parse_mesh("data:2;model:4")


def test_the_batch_lies_on_the_first_axis_unless_told():
    assert parse_layout("", MESH) == {"batch": "data"}
    assert parse_layout("batch:model", MESH) == {"batch": "model"}
    assert parse_layout(" heads : model ; ffn:model;", MESH) == {"batch": "data", "heads": "model", "ffn": "model"}


@pytest.mark.parametrize("text", ["heads", "heads=model", "heads:model:4", "heads:4", "a b:model"])
def test_refuses_what_is_no_rule(text):
    with pytest.raises(InputError, match="^A layout is a list of DIM:AXIS separated by ;.*Received: "):
        split_rules(text)


def test_refuses_two_rules_for_a_dim_and_unknown_axes():
    with pytest.raises(InputError, match="each dim once. Received: heads on model and on data"):
        split_rules("heads:model;heads:data")
    with pytest.raises(InputError, match="has no axis modell. Did you mean"):
        parse_layout("heads:modell", MESH)


def test_rules_lay_named_dims():
    rules = {"batch": "data", "ffn": "model"}
    layout = laid_out("ffn_in/kernel", ("embed", "ffn"), (6, 8), rules, MESH)
    assert layout == Layout((None, "model"))
    assert (layout.parts(MESH), str(layout)) == (4, "*,model")
    assert laid_out("x", (None, "other"), (3, 5), rules, MESH) == Layout((None, None))
    assert laid_out("both", ("batch", "ffn"), (2, 4), rules, MESH).parts(MESH) == 8


def test_an_axis_splits_one_dim_of_a_tensor():
    with pytest.raises(InputError, match="puts heads and ffn of w on the axis model"):
        laid_out("w", ("heads", "ffn"), (4, 4), {"heads": "model", "ffn": "model"}, MESH)


def test_an_axis_divides_its_dim():
    with pytest.raises(InputError, match="shards ffn of w over the 4 devices of model.*Received: ffn of 6"):
        laid_out("w", ("embed", "ffn"), (4, 6), {"ffn": "model"}, MESH)


WHOLE, SPLIT = Layout((None, None)), Layout((None, "data"))


@pytest.mark.parametrize(
    ("stage", "stored", "gradient", "slots"),
    [
        ("none", WHOLE, WHOLE, WHOLE),
        ("optimizer", WHOLE, WHOLE, SPLIT),
        ("gradients", WHOLE, SPLIT, SPLIT),
        ("parameters", SPLIT, SPLIT, SPLIT),
    ],
)
def test_stages_of_zero(stage, stored, gradient, slots):
    found = placed(WHOLE, (4, 6), MESH, Shard(stage, "data", 1))
    assert (found.computed, found.stored, found.gradient, found.slots) == (WHOLE, stored, gradient, slots)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("model", None), (4, 6), ("model", "data")),  # in addition to another axis
        ((None, None, None), (4, 6, 8), (None, "data", None)),  # the first suitable one after the first
        ((None, None), (4, 5), ("data", None)),  # the first, if no other is divisible
        ((None, None), (3, 5), (None, None)),
        (("data", None), (4, 6), ("data", None)),  # the axis is already used
        ((None,), (2,), (None,)),  # too small
    ],
)
def test_what_is_sharded_over(axes, shape, expected):
    assert placed(Layout(axes), shape, MESH, Shard("parameters", "data", 4)).stored == Layout(expected)


def test_an_axis_of_one_device_splits_nothing():
    mesh = parse_mesh("data:2;model:1")
    assert placed(Layout((None, "model")), (3, 4), mesh, Shard("parameters", "data", 4)).stored == Layout(
        (None, "data")
    )
    assert placed(Layout((None, None)), (3, 4), mesh, Shard("parameters", "model", 4)).stored == Layout((None, None))
