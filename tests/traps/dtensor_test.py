"""Cases in which TensorFlow's DTensor is silently wrong or fails, which `mesh` works around. A failing test is good news."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.dtensor.python.api import _dtensor_device
from tensorflow.experimental import dtensor

from tests import jobs as processes
from tests.strategies.mesh_test import longest_pause
from tfdist import keras_internals
from tfdist.config.layouts import Layout
from tfdist.keras_internals import tf_internals


@pytest.fixture
def devices(mesh2x2):
    return mesh2x2.devices


def lay(devices, value, *axes):
    return devices.place(value, Layout(axes))


def is_alone(request: pytest.FixtureRequest) -> bool:
    """Returns whether this process runs one test alone; otherwise asserts that the test passes in a process that does.

    DTensor's order of reads and assignments depends on what a process has compiled before.
    """
    if os.environ.get("ALONE"):
        return True
    own = request.node.nodeid.partition("@")[0]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", own]
    done = subprocess.run(
        command,
        cwd=request.config.rootpath,
        env=os.environ | {"ALONE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    return False


@pytest.mark.parametrize(("dtype", "right"), [("float32", True), ("float64", False)])
def test_cross_entropy_over_split_classes_is_wrong_in_float64(devices, dtype, right):
    random = np.random.default_rng(0)
    logits, labels = random.standard_normal((8, 12)).astype(dtype), random.integers(0, 12, 8)
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    compute = tf.function(tf.nn.sparse_softmax_cross_entropy_with_logits)
    found = devices.full_tensor(compute(lay(devices, labels, "data"), lay(devices, logits, "data", "model")))
    assert np.allclose(found, expected, atol=1e-5) == right


def test_a_convolution_split_over_its_output_channels_does_not_compile(devices):
    images, kernel = np.ones([4, 6, 6, 2], "float32"), np.ones([3, 3, 2, 4], "float32")
    convolve = tf.function(lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), autograph=False)
    with pytest.raises(tf.errors.OpError):
        convolve(lay(devices, images, "data", None, None, None), lay(devices, kernel, None, None, None, "model"))


def send(x):
    return tf.raw_ops.CollectiveBcastSendV2(input=x, group_size=2, group_key=1, instance_key=1)


@pytest.mark.parametrize(
    "operation", [lambda x: tf.ensure_shape(tf.boolean_mask(x, x > 0), [4]), lambda _: tf.timestamp(), send]
)
def test_operations_without_a_layout(devices, operation):
    with pytest.raises(tf.errors.OpError, match="does not implement layout propagation"):
        tf.function(operation, autograph=False)(lay(devices, np.ones(4, "float32"), "data"))


@pytest.mark.parametrize(("axis", "right"), [(-1, False), (1, None)])
def test_a_layout_that_is_required_of_a_concatenation_is_that_of_its_parts(devices, axis, right):
    """With a negative axis, which is not recognized as sharded; otherwise it is refused. So concatenations are laid out."""
    value = np.arange(32, dtype="float32").reshape(4, 8)
    required = devices.layout(Layout(("data", "model")))
    concatenate = tf.function(lambda x: dtensor.relayout(tf.concat([x * 1, x * 2], axis), required), autograph=False)
    if right is None:
        with pytest.raises(tf.errors.OpError, match="Concat op SPMD with concat dimension in sharded dimension"):
            concatenate(lay(devices, value, "data", None))
    else:
        found = devices.full_tensor(concatenate(lay(devices, value, "data", None)))
        assert np.array_equal(found, np.concatenate([value, 2 * value], 1)) == right


@pytest.mark.parametrize(
    ("function", "axes", "message"),
    [
        (lambda x: tf.slice(x, [0, 2], [-1, 4]) ** 2, ("data", "model"), "inconsistent with the provided layout"),
        (lambda x: tf.math.top_k(x, 2).values, ("data", None), "does not index into shape"),
    ],
    ids=["slice by sizes", "top k"],
)
def test_gradients_that_are_not_those_of_shards(devices, function, axes, message):
    """So `tf.slice` becomes a slice with strides, as its gradient does not compile along a sharded dim.

    That of top k is scattered by indices in the whole tensor, so it is computed of replicated tensors. On a CPU, an index
    outside of a shard is an error.
    """

    def compute(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x * x))
        return tape.gradient(loss, x)

    value = np.arange(32, dtype="float32").reshape(4, 8)
    with pytest.raises(tf.errors.OpError, match=message):
        devices.full_tensor(tf.function(compute, autograph=False)(lay(devices, value, *axes)))


@pytest.mark.parametrize("copied", [False, True])
def test_a_transpose_that_is_required_to_be_sharded_is_refused(devices, copied):
    """Unless it is one of an identity, which is laid out as it requires."""
    value = np.arange(32, dtype="float32").reshape(4, 8)

    def compute(x):
        rows = dtensor.relayout(x * 1, devices.layout(Layout(("data", None))))
        transposed = tf.transpose(tf.identity(rows) if copied else rows)
        return dtensor.relayout(transposed, devices.layout(Layout(("model", "data"))))

    laid = lay(devices, value, "data", "model")
    if copied:
        assert np.array_equal(devices.full_tensor(tf.function(compute, autograph=False)(laid)), value.T)
    else:
        with pytest.raises(tf.errors.OpError, match="TransposeOp SPMD needs communication"):
            tf.function(compute, autograph=False)(laid)


@pytest.mark.parametrize("part", [np.s_[:, ::-1], np.s_[:, ::4]], ids=["reverse", "every fourth"])
@pytest.mark.parametrize(("axes", "right"), [(("data", None), True), (("data", "model"), False)])
def test_strides_are_taken_of_each_shard(devices, part, axes, right):
    """So tensors are laid out before they are sliced; `tf.reverse` has no layout at all."""
    value = np.arange(24, dtype="float32").reshape(4, 6)
    found = tf.function(lambda x: (x * 1)[part], autograph=False)(lay(devices, value, *axes))
    assert np.array_equal(devices.full_tensor(found), value[part]) == right
    with pytest.raises(tf.errors.OpError, match="'tf.ReverseV2' op does not implement layout propagation"):
        tf.function(lambda x: tf.reverse(x, [1]), autograph=False)(lay(devices, value, *axes))


def test_a_split_random_tensor_has_other_numbers(devices):
    """So initial values are drawn on the host, and random layers draw all numbers on each device."""
    draw = tf.function(lambda: keras.random.uniform([4, 4], seed=3))
    split = dtensor.call_with_layout(draw, devices.layout(Layout(("data", "model"))))
    assert not np.allclose(devices.full_tensor(split), draw())


@pytest.mark.parametrize(
    ("before", "after", "right"),
    [
        (("data", "model", None), ("data", None, "model"), True),
        ((None, "model", None, None), ("model", None, None, None), True),
        (("data", "model", None, None), ("data", None, "model", None), False),
        ((None, None, "model", None), (None, None, None, "model"), False),
    ],
)
def test_an_axis_that_moves_between_inner_dims_of_four_is_wrong(devices, before, after, right):
    value = np.arange(np.prod([4, 8, 12, 16][: len(before)]), dtype="float32").reshape([4, 8, 12, 16][: len(before)])
    moved = tf.function(lambda x: dtensor.relayout(x * 1, devices.layout(Layout(after))))(lay(devices, value, *before))
    assert np.array_equal(devices.full_tensor(moved), value) == right
    relaid = tf.function(lambda x: devices.relayout(x * 1, Layout(after)))(lay(devices, value, *before))
    assert np.array_equal(devices.full_tensor(relaid), value)


@pytest.mark.processes
@pytest.mark.parametrize(("parts", "right"), [("rows", True), ("shares of shards", False)])
def test_of_two_updates_of_a_variable_in_one_program_one_is_lost(devices, parts, right, request):
    """So micro-steps assign once (tfdist/step/gradient_source.py)."""
    if not is_alone(request):
        return
    total = devices.variable(np.float32(0), Layout(()), "total")

    def part(x, number):
        if parts == "rows":
            return x[number : number + 2]
        return tf.reshape(tf.reshape(x, [2, 2, 1, 2])[:, number], [2, 2])

    @tf.function(autograph=False)
    def update(x):
        for number in range(2):
            total.assign(tf.convert_to_tensor(total) + tf.reduce_sum(part(x, number)))

    value = np.arange(8, dtype="float32").reshape(4, 2)
    update(lay(devices, value, "data", None))
    expected = value[0:2].sum() + value[1:3].sum() if parts == "rows" else value.sum()
    assert (devices.full_tensor(total.read_value()).numpy() == expected) == right


def test_a_product_makes_one_dim_of_rows_and_sequence(devices):
    """So a sharded sequence is gathered."""
    x, kernel = np.ones([4, 8, 6], "float32"), np.ones([6, 2], "float32")
    product = tf.function(lambda x, y: tf.tensordot(x, y, 1))(
        lay(devices, x, None, "model", None), lay(devices, kernel, None, None)
    )
    assert dtensor.fetch_layout(product).sharding_specs == [dtensor.UNSHARDED] * 3


@pytest.mark.parametrize(("dtype", "programs"), [("int64", 2), ("uint64", 1)])
def test_a_number_that_changes_is_a_constant_at_first(devices, dtype, programs):
    """So computations with it are compiled twice, unless its dtype is not one of sizes and axes."""
    add = tf.function(lambda x, number: x + tf.cast(number, x.dtype), autograph=False)
    rows, before = lay(devices, np.ones([8, 8], "float32"), "data", None), compiled_programs()
    for number in range(3):
        add(rows, tf.constant(number, dtype))
    assert compiled_programs() - before == programs


def compiled_programs():
    return _dtensor_device()._get_stats()["function_manager.miss"]


@pytest.mark.parametrize("waits", [True, False])
def test_unpacking_holds_the_gil_until_the_values_are_computed(devices, waits):
    """So a program that other threads must accompany, such as those of messages, is waited for before."""
    products = tf.function(lambda x: tf.linalg.matmul(x, tf.linalg.matmul(x, tf.linalg.matmul(x, x))), autograph=False)
    x = lay(devices, np.full([1500, 1500], 1e-4, "float32"), None, None)
    dtensor.unpack(products(x))[0].numpy()

    def compute():
        product = products(x)
        if waits:
            keras_internals.wait_for_devices()
        dtensor.unpack(product)[0].numpy()

    # Other programs of a loaded machine may delay that thread, too.
    assert any(longest_pause(compute) < 0.5 for _ in range(10 if waits else 1)) == waits


def test_a_tape_outside_of_a_program_lays_out_gradients_by_itself(devices):
    """So a backward pass is a program of its own, which lays out the gradients as the variables are stored."""
    kernel = devices.variable(np.ones([8, 6], "float32"), Layout(("model", None)), "kernel")
    x = lay(devices, np.ones([2, 8], "float32"), None, None)
    forward = tf.function(lambda x: devices.relayout(x @ kernel, Layout((None, None))), autograph=False)
    with tf.GradientTape() as tape:
        y = forward(x)
    gradient = tape.gradient(y, kernel, output_gradients=lay(devices, np.ones([2, 6], "float32"), None, None))
    assert np.array_equal(devices.full_tensor(gradient), np.full([8, 6], 2.0))
    assert dtensor.fetch_layout(gradient).sharding_specs != dtensor.fetch_layout(kernel.read_value()).sharding_specs


def split(devices, function, target):
    """Traces the gradient of a function for a sharded kernel in a program of its own, as a stage of a pipeline does.

    Returns:
      The program, with the values of what it captures of the forward program.
    """
    kernel = devices.variable(np.full([8, 6], 0.1, "float32"), Layout((None, "model")), "kernel")
    traced = []

    @tf.function(autograph=False)
    def forward(x):
        with tf.GradientTape() as tape:
            own = function(x @ kernel)
            replicated = devices.relayout(own, Layout((None, None)))
        y = {"own": own, "replicated": replicated}[target]

        def backward(upstream):
            return [
                devices.relayout(tape.gradient(y, kernel.handle, output_gradients=upstream), Layout((None, "model")))
            ]

        traced.append(keras_internals.trace_inside(backward, [tf.TensorSpec(y.shape, y.dtype)]))
        return traced[0][2]

    residuals = forward(lay(devices, np.full([2, 8], 0.1, "float32"), None, None))
    values = iter(residuals)
    program, outside, _ = traced[0]
    return program, [next(values) if outer is None else outer for outer in outside]


def test_the_gradient_of_a_relayout_keeps_its_input(devices):
    """So a stage differentiates what it has before that is laid out to be sent: the backward program would need it."""
    own, replicated = (split(devices, lambda y: y, target)[1] for target in ("own", "replicated"))
    assert [tuple(x.shape) for x in replicated if x.dtype == tf.float32] == [(2, 6), (2, 8)]
    assert [tuple(x.shape) for x in own if x.dtype == tf.float32] == [(2, 8)]


@pytest.mark.parametrize("constant", [True, False])
def test_shapes_must_be_constants_of_the_backward_program(devices, constant, monkeypatch):
    """So `trace_inside` copies constants of the forward program, instead of capturing them; here the axis of a concat."""
    if not constant:
        monkeypatch.setattr(tf_internals, "_constant", lambda tensor: tensor)
    program, captured = split(devices, lambda y: tf.concat([y, y], axis=1), "own")
    upstream = lay(devices, np.ones([2, 12], "float32"), None, None)
    if constant:
        [gradient] = keras_internals.call_with_captures(program, [upstream], captured)
        assert np.allclose(devices.full_tensor(gradient), 0.4)
    else:
        with pytest.raises(tf.errors.OpError, match="does not implement layout propagation"):
            keras_internals.call_with_captures(program, [upstream], captured)


OWN_MESHES = """
import numpy as np, tensorflow as tf, tfdist
from tensorflow.experimental import dtensor
from tfdist.cluster.devices import local_device_names

local_device_names(2)
task = tfdist.load_strategy("multiworker", start_timeout_seconds=60).group.rank
devices = [tf.DeviceSpec(job="worker", replica=0, task=task, device_type="CPU", device_index=i) for i in range(2)]
mesh = dtensor.Mesh(["model"], np.arange(2), [0, 1], devices)
layouts = [dtensor.Layout(axes, mesh) for axes in (["unsharded", "model"], ["model", "unsharded"])]
parts = [dtensor.pack([np.ones([4, 4])] * 2, layout) for layout in layouts]
tf.function(lambda x, y: dtensor.relayout(x @ y, dtensor.Layout.replicated(mesh, 2)), autograph=False)(*parts)
"""


@pytest.mark.processes
@pytest.mark.full
def test_own_meshes_of_two_processes_have_the_same_keys():
    """With TensorFlow's servers, the first process decides for all which devices have a group key.

    Both would use key 0 for their own devices. So the stages of a pipeline share a mesh, whose groups have the numbers of its
    rows as keys; `_collective_key_base` keeps them apart from those of tf.distribute, which count from 1 upwards.
    """
    with processes.job([sys.executable, "-c", OWN_MESHES], 2) as job:
        outputs = [end.output for end in job.wait(300)]
    assert any("is joining a group that is already full" in output for output in outputs), outputs
