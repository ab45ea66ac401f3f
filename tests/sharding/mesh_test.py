import pytest

from tfdist.errors import InputError
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
def test_refuses(text, received):
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
