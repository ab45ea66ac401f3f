"""Meshes and layouts of tensors on them."""

import pytest

from tfdist.config.layouts import Layout, Shard, layout_by_rules, parse_layout, shard_placement, split_rules
from tfdist.config.mesh import Mesh, mesh_of, parse_mesh
from tfdist.errors import InputError


def test_axes_keep_their_order():
    mesh = parse_mesh(" data:2; model : 4;")
    assert list(mesh.axes.items()) == [("data", 2), ("model", 4)]
    assert mesh.size == 8
    assert str(mesh) == "data:2;model:4"


@pytest.mark.parametrize(
    ("text", "received"),
    [
        (";", "an empty list in ';'"),
        ("data:2;unsharded:2", "'unsharded:2' in"),
        ("data:256;model:512", "131072 in"),
    ],
)
def test_refuses_what_is_no_mesh(text, received):
    """tests/cli/wrong_uses.tsv has more, as whole lines."""
    with pytest.raises(InputError, match="^A mesh is a list of NAME:SIZE separated by ;.*Received: ") as raised:
        parse_mesh(text)
    assert received in str(raised.value)


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


MESH = parse_mesh("data:2;model:4")


def test_the_batch_lies_on_the_first_axis_unless_told():
    assert parse_layout("", MESH) == {"batch": "data"}
    assert parse_layout("batch:model", MESH) == {"batch": "model"}
    assert parse_layout(" heads : model ; ffn:model;", MESH) == {"batch": "data", "heads": "model", "ffn": "model"}


def test_rules_lay_named_dims():
    rules = {"batch": "data", "ffn": "model"}
    layout = layout_by_rules("ffn_in/kernel", ("embed", "ffn"), (6, 8), rules, MESH)
    assert layout == Layout((None, "model"))
    assert (layout.shard_count(MESH), str(layout)) == (4, "*,model")
    assert layout_by_rules("x", (None, "other"), (3, 5), rules, MESH) == Layout((None, None))
    assert layout_by_rules("both", ("batch", "ffn"), (2, 4), rules, MESH).shard_count(MESH) == 8


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
    found = shard_placement(WHOLE, (4, 6), MESH, Shard(stage, "data", 1))
    assert (found.computation, found.storage, found.gradient, found.slots) == (WHOLE, stored, gradient, slots)


ONE_MODEL = parse_mesh("data:2;model:1")


@pytest.mark.parametrize(
    ("axes", "shape", "expected", "mesh", "axis"),
    [
        (("model", None), (4, 6), ("model", "data"), MESH, "data"),  # in addition to another axis
        ((None, None, None), (4, 6, 8), (None, "data", None), MESH, "data"),  # the first suitable one after the first
        ((None, None), (4, 5), ("data", None), MESH, "data"),  # the first, if no other is divisible
        ((None, None), (3, 5), (None, None), MESH, "data"),
        (("data", None), (4, 6), ("data", None), MESH, "data"),  # the axis is already used
        ((None,), (2,), (None,), MESH, "data"),  # too small
        ((None, "model"), (3, 4), (None, "data"), ONE_MODEL, "data"),  # an axis of one device splits nothing
        ((None, None), (3, 4), (None, None), ONE_MODEL, "model"),
    ],
)
def test_what_is_sharded_over(axes, shape, expected, mesh, axis):
    assert shard_placement(Layout(axes), shape, mesh, Shard("parameters", axis, 4)).storage == Layout(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MESH.size_of("modle"), "The mesh data:2;model:4 has no axis modle. Did you mean .*model"),
        (lambda: mesh_of("a:2;b:2", 3), "--mesh_shape=a:2;b:2, of size 4, --devices=3. Change one"),
        (lambda: mesh_of("a:2;b:2", 4, 2), "--devices=4 on each of 2 processes"),
        (lambda: mesh_of("a:2;b:2", 0, 3), "--mesh_shape=a:2;b:2, of size 4, and 3 processes"),
        *(
            (lambda text=text: split_rules(text), "^A layout is a list of DIM:AXIS separated by ;.*Received: ")
            for text in ("heads", "heads=model", "heads:model:4", "heads:4", "a b:model")
        ),
        (lambda: split_rules("heads:model;heads:data"), "each dim once. Received: heads on model and on data"),
        (lambda: parse_layout("heads:modell", MESH), "has no axis modell. Did you mean"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
