"""TensorFlow's operations on a mesh, in every layout of their input: the values and gradients of one device, or an error.

DTensor is silently wrong for some (tests/traps/dtensor_test.py): a new version of TensorFlow must not add any.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfdist.config.layouts import Layout

RANDOM = np.random.default_rng(0)
SEQUENCES, IMAGES = RANDOM.normal(size=(4, 8, 4)), RANDOM.normal(size=(4, 4, 4, 8))
KERNEL, FILTER = RANDOM.normal(size=(3, 4, 2)), RANDOM.normal(size=(3, 3, 8, 2))
ops = keras.ops


def _window(x):
    return tf.reshape(tf.transpose(tf.reshape(x, [4, 2, 2, 2, 2, 8]), [0, 1, 3, 2, 4, 5]), [-1, 2, 2, 8])


def _attention(x):
    return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(tf.einsum("bqhd,bkhd->bhqk", x, x)), x)


OF_SEQUENCES = {
    "reductions": [
        *(lambda x, axis=axis: tf.reduce_sum(x, axis) for axis in (0, 1, 2, None)),
        lambda x: tf.reduce_mean(x, 1, keepdims=True),
        lambda x: tf.reduce_max(x, 1),
        lambda x: tf.reduce_min(x, -1),
        lambda x: tf.math.reduce_std(x, 1),
        lambda x: tf.reduce_logsumexp(x, 1),
        lambda x: tf.cast(tf.reduce_any(x > 1, 1), tf.float64),
        lambda x: tf.cast(tf.reduce_all(x > -1, 1), tf.float64),
        lambda x: tf.norm(x, axis=1),
        lambda x: tf.nn.l2_normalize(x, -1),
        lambda x: tf.nn.moments(x, [0, 1])[1],
        lambda x: ops.median(x, -1),
        lambda x: tf.nn.l2_loss(x),
    ],
    "running sums": [
        *(lambda x, axis=axis: tf.cumsum(x, axis) for axis in range(-1, 3)),
        lambda x: tf.cumsum(x, 1, exclusive=True),
        lambda x: tf.cumsum(x, 1, reverse=True),
        lambda x: tf.nn.softmax(x),
        lambda x: tf.nn.log_softmax(x),
    ],
    "shapes": [
        *(lambda x, dims=dims: tf.transpose(x, dims) for dims in itertools.permutations(range(3))),
        *(
            lambda x, shape=shape: tf.reshape(x, shape)
            for shape in ([4, 32], [32, 4], [-1], [4, 2, 4, 4], [4, 4, 8], [8, 4, 4], [2, 2, 8, 4])
        ),
        lambda x: tf.reshape(x, [tf.shape(x)[0], -1]),
        lambda x: tf.expand_dims(x, 1),
        lambda x: tf.squeeze(tf.expand_dims(x, 2), 2),
        lambda x: tf.broadcast_to(x[:, :, :1], [4, 8, 4]),
        *(lambda x, axis=axis: tf.concat([x, 2 * x], axis) for axis in range(-1, 3)),
        *(lambda x, axis=axis: tf.stack([x, 2 * x], axis) for axis in range(-1, 3)),
        *(lambda x, axis=axis: tf.unstack(x, axis=axis)[-1] for axis in range(-1, 3)),
        *(lambda x, axis=axis: tf.split(x, 2, axis)[1] for axis in range(-1, 3)),
        *(lambda x, axis=axis: tf.repeat(x, 2, axis) for axis in range(-1, 3)),
        lambda x: tf.tile(x, [1, 2, 1]),
        lambda x: tf.pad(x, [[0, 0], [1, 1], [0, 0]]),
        lambda x: tf.pad(x, [[0, 0], [2, 0], [0, 0]])[:, :-2],
    ],
    "slices": [
        *(
            lambda x, part=part: x[part]
            for part in (
                *(np.s_[:, 1:], np.s_[:, :-1], np.s_[1:], np.s_[:, ::2], np.s_[:, 2:6:2], np.s_[..., 1:3], np.s_[:, 0]),
                *(np.s_[:, -1], np.s_[::2], np.s_[2], np.s_[:, 3:5], np.s_[:, 4:]),
                *(np.s_[:, ::-1], np.s_[::-2, :, ::-1]),
            )
        ),
        lambda x: tf.slice(x, [0, 1, 0], [4, 4, 4]),
        lambda x: tf.slice(x, [0, 0, 2], [-1, 4, -1]),
        *(lambda x, axis=axis: tf.concat([x[:, -1:], x[:, :-1]], axis) for axis in (1, -2)),
        lambda x: tf.reverse(x, [0, 2]),
        lambda x: tf.gather(x, [3, 0, 1], axis=0),
        lambda x: tf.gather(x, [7, 0, 3], axis=1),
        lambda x: tf.gather(x, [3, 1], axis=-1),
        lambda x: tf.gather(x, tf.constant([[0, 1], [2, 3], [4, 5], [6, 7]]), batch_dims=1, axis=1),
        lambda x: tf.gather_nd(x, [[0, 1], [3, 7]]),
        lambda x: ops.take_along_axis(x, ops.argsort(x, 1), 1),
        lambda x: tf.boolean_mask(x, [True, False, True, True]),
        lambda x: tf.tensor_scatter_nd_update(x, [[0], [2]], tf.zeros([2, 8, 4], tf.float64)),
        lambda x: tf.tensor_scatter_nd_add(x, [[0, 1]], tf.ones([1, 4], tf.float64)),
        lambda x: tf.math.unsorted_segment_sum(x, tf.constant([0, 1, 0, 1]), 2),
    ],
    "indices": [
        lambda x: tf.cast(tf.argmax(x, 1), tf.float64),
        lambda x: tf.nn.top_k(x, 2)[0],
        lambda x: x - ops.quantile(x, 0.3, 1, keepdims=True),
        lambda x: tf.cast(tf.nn.top_k(x, 2)[1], tf.float64),
        lambda x: ops.sort(x, 1),
        lambda x: tf.cast(ops.argsort(x, -1), tf.float64),
        lambda x: tf.one_hot(tf.cast(tf.abs(x[:, :, 0]) * 2, tf.int32), 5, dtype=tf.float64),
        lambda x: x * tf.sequence_mask([1, 8, 3, 4], 8, dtype=tf.float64)[:, :, tf.newaxis],
        lambda x: x * tf.range(8, dtype=tf.float64)[:, tf.newaxis],
        lambda x: tf.where(x[:, :, :1] > 0, x, -x),
    ],
    "products": [
        *(
            lambda x, sum_=sum_: tf.einsum(sum_, x, x)
            for sum_ in ("bij,bkj->bik", "bij,bik->bjk", "bij,bij->b", "bij,cij->bc", "bij,bij->ij")
        ),
        lambda x: tf.matmul(x, x, transpose_b=True),
        lambda x: tf.tensordot(x, x, [[1], [1]]),
        lambda x: tf.tensordot(x, tf.ones([4, 8], tf.float64), 1),
        lambda x: ops.outer(x[:, 0, 0], x[0, :, 0]),
        lambda x: tf.nn.conv1d(x, KERNEL, 1, "SAME"),
    ],
    "losses": [
        lambda x: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(x * 2), x),
        lambda x: tf.nn.sigmoid_cross_entropy_with_logits(tf.sigmoid(x * 2), x),
        lambda x: tf.math.squared_difference(x, tf.reduce_mean(x, 1, keepdims=True)),
    ],
}
OF_IMAGES = {
    "images": [
        lambda x: tf.nn.conv2d(x, FILTER, 1, "SAME"),
        lambda x: tf.nn.conv2d(x, FILTER, 2, "SAME"),
        lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"),
        lambda x: tf.reduce_mean(x, [1, 2]),
        lambda x: tf.repeat(tf.repeat(x, 2, 1), 2, 2),
        lambda x: tf.nn.moments(tf.reshape(x, [4, 4, 4, 2, 4]), [1, 2, 4])[1],
        lambda x: tf.nn.bias_add(x, tf.range(8, dtype=tf.float64)),
        lambda x: tf.image.flip_left_right(x),
        lambda x: tf.image.flip_up_down(x),
    ],
    "windows and heads": [
        *(lambda x, axis=axis: tf.concat([-x[..., 4:], x[..., :4]], axis) for axis in (3, -1)),
        *(lambda x, axis=axis: tf.concat([x, 2 * x], axis) for axis in (0, 1, -2, -1)),
        *(lambda x, dims=dims: tf.transpose(x, dims) for dims in ([0, 2, 1, 3], [0, 3, 1, 2])),
        *(lambda x, shape=shape: tf.reshape(x, shape) for shape in ([4, 16, 8], [4, 4, 32], [4, 2, 2, 2, 2, 8])),
        lambda x: tf.einsum("bqhd,bkhd->bhqk", x, x),
        _attention,
        _window,
    ],
}
CASES = [(name, SEQUENCES, found) for name, found in OF_SEQUENCES.items()]
CASES += [(name, IMAGES, found) for name, found in OF_IMAGES.items()]


# By number, what no layout of the result allows: a split of sharded rows, and products of all pairs of rows.
REFUSED = {"shapes": {30}, "products": {3}}


def layouts(rank):
    """Returns the layouts with the axes on different dims, and on one dim."""
    for dims in itertools.permutations(range(rank), 2):
        yield tuple({dims[0]: "data", dims[1]: "model"}.get(dim) for dim in range(rank))
    for dim in range(rank):
        yield tuple("model" if each == dim else None for each in range(rank))


def computed(function, value, weights):
    with tf.GradientTape() as tape:
        tape.watch(value)
        found = function(value * 1)
        loss = tf.reduce_sum(found * weights)
    gradient = tape.gradient(loss, value)
    return [found, loss, *([] if gradient is None else [gradient])]


def required_layouts(shape):
    """Returns the layouts of a result with an axis on each dim that it divides."""
    for dim in (each for each, size in enumerate(shape) if size % 2 == 0):
        rows = {0: "data"} if dim and shape[0] % 2 == 0 else {}
        yield tuple({**rows, dim: "model"}.get(each) for each in range(len(shape)))


def compare(functions, value, pairs, mesh):
    """Compares values and gradients in pairs of layouts, of the input and of the result, with those of one device."""
    devices, wrong, compiled = mesh.devices, [], set()
    for number, function in enumerate(functions):
        weights = np.random.default_rng(1).normal(size=function(tf.constant(value)).shape)
        expected = computed(function, tf.constant(value), weights)
        for axes, required in pairs(weights.shape):

            @tf.function(autograph=False)
            def compute(value, weights, function=function, required=required):
                def placed(x):
                    found = function(x)
                    return found if required is None else devices.relayout(found, Layout(required))

                with mesh.layouts.tracing():
                    return computed(placed, value, weights)

            laid = devices.place(value, Layout(axes)), devices.place(weights, Layout.replicated(weights.ndim))
            try:
                found = [devices.full_tensor(each) for each in compute(*laid)]
            except tf.errors.OpError:
                continue
            compiled.add(number)
            if not all(np.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(found, expected, strict=True)):
                wrong.append((number, axes, required))
    return wrong, compiled


@pytest.mark.full
@pytest.mark.parametrize(("name", "value", "functions"), CASES, ids=[name for name, *_ in CASES])
def test_operations_give_the_values_of_one_device_or_are_refused(name, value, functions, mesh2x2):
    wrong, compiled = compare(functions, value, lambda _: ((axes, None) for axes in layouts(value.ndim)), mesh2x2)
    assert not wrong
    assert compiled == {*range(len(functions))}  # each of them in a layout


@pytest.mark.full
@pytest.mark.parametrize(("name", "value", "functions"), CASES, ids=[name for name, *_ in CASES])
def test_operations_whose_results_are_required_to_be_sharded(name, value, functions, mesh2x2):
    """DTensor may compute an operation in the layout that is required of its result.

    Of four dims, no other dim of the input is sharded: an axis that moves between them is wrong (tests/traps/dtensor_test.py).
    """
    inputs = [("data", None, None), ("data", "model", None)] if value is SEQUENCES else [("data", None, None, None)]
    wrong, compiled = compare(
        functions, value, lambda shape: itertools.product(inputs, required_layouts(shape)), mesh2x2
    )
    assert not wrong
    tensors = {number for number, function in enumerate(functions) if function(tf.constant(value)).shape.rank}
    assert tensors - compiled == REFUSED.get(name, set())


@pytest.mark.full
def test_such_a_comparison_finds_what_is_wrong(mesh2x2):
    """Without the layouts of tfdist, a sharded dim is reversed within its shards."""
    laid = mesh2x2.devices.place(SEQUENCES, Layout(("data", "model", None)))
    found = tf.function(lambda x: (x * 1)[:, ::-1], autograph=False)(laid)
    assert dtensor.is_dtensor(found) and not np.allclose(mesh2x2.devices.full_tensor(found), SEQUENCES[:, ::-1])
