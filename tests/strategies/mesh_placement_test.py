"""Operations that rearrange elements, on a mesh: flips, bidirectional layers and metrics as on one device."""

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import array_ops, gen_array_ops, gen_nn_ops

import tfdist
from tfdist.config.layouts import Layout
from tfdist.distribution.mesh_checks import reject_unsafe_operations
from tfdist.errors import InputError

VALUE = np.random.default_rng(4).standard_normal((4, 8, 6))
ODD = np.random.default_rng(4).standard_normal((10, 6, 2))  # shards of 5 and of 3
REARRANGED = {
    "a concatenation": lambda x: tf.concat([x, 2 * x], 1),
    "a concatenation of the last dim": lambda x: tf.concat([x[:, 0, :2], 2 * x[:, 1, :2]], -1),
    "keras.ops.concatenate": lambda x: keras.ops.concatenate([x[:, :, 0], 2 * x[:, :, 1]], -1),
    "a concatenation of rows": lambda x: tf.concat([x, 2 * x], -3),
    "a concatenation of images": lambda x: tf.concat([x[:, :2, :, tf.newaxis], x[:, 2:4, :, tf.newaxis]], 0),
    "a concatenation of vectors": lambda x: tf.concat([x[:, 0, 0], [1.0, 2.0], x[:, 0, 1]], -1),
    "a concatenation by a shape": lambda x: tf.reshape(x, tf.concat([[x.shape[0] // 2, 2], tf.shape(x)[1:]], 0)),
    "a concatenation of many": lambda x: tf.concat([x[:, :2], x[:, 2:3], x[:, 3:]], axis=-2),
    "a transpose": lambda x: tf.transpose(x[:, :2], [0, 2, 1]),
    "tf.slice": lambda x: tf.slice(x, [0, 1, 1], [-1, 4, 1]),
    "tf.slice of rows": lambda x: tf.slice(x, [2, 0, 0], [2, -1, -1]),
    "keras.ops.slice": lambda x: keras.ops.slice(x, [0, 2, 0], [4, 2, 2]),
    "tf.math.top_k": lambda x: tf.math.top_k(x, 2).values,
    "keras.ops.sort": lambda x: keras.ops.sort(x, 1),
    "tf.reverse of rows": lambda x: tf.reverse(x, [0]),
    "tf.reverse of two dims": lambda x: tf.reverse(tensor=x, axis=[1, -1]),
    "keras.ops.flip": lambda x: keras.ops.flip(x, 1),
    "keras.ops.flip of all dims": keras.ops.flip,
    "tf.image.flip_left_right": lambda x: tf.image.flip_left_right(x[..., tf.newaxis])[..., 0],
    "a range of rows": lambda x: x[1:3, ::2],
    "a slice": lambda x: x[:, ::-1],
    "every third": lambda x: x[::3],
    "every fourth": lambda x: x[:, ::4],
    "every third, and the reverse": lambda x: x[::3, ::-1],
    "every other": lambda x: x[::-2, :, 1::2],
    "behind an ellipsis": lambda x: x[..., ::-1],
    "an ellipsis of no dims": lambda x: x[..., ::-1, :, :],
    "a new dim": lambda x: x[tf.newaxis, :, ::-1, :][0],
    "one of a dim": lambda x: x[1, ::-1],
    "nothing": lambda x: tf.reverse(x, []),
    "a vector": lambda x: x[:, 0, 0][::-1],
    "five dims": lambda x: x[:, :, tf.newaxis, :, tf.newaxis][:, ::-1],
}


@pytest.mark.parametrize("value", [VALUE, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("case", REARRANGED)
def test_values_and_gradients(case, value, mesh2x2):
    layouts, devices, function = mesh2x2.layouts, mesh2x2.devices, REARRANGED[case]
    with tf.GradientTape() as tape:
        x = tf.constant(value)
        tape.watch(x)
        expected = function(x * x)
        weights = tf.reshape(tf.range(tf.size(expected, tf.int64), dtype=tf.float64), expected.shape)
        loss = tf.reduce_sum(expected * weights)
    gradient = tape.gradient(loss, x)
    axes = [
        axis if size % 2 == 0 else None
        for axis, size in zip(("data", "model", None, None, None), expected.shape, strict=False)
    ]

    @tf.function(autograph=False)
    def compute(x, weights):
        with layouts.tracing(), tf.GradientTape() as tape:
            tape.watch(x)
            found = devices.relayout(function(x * x), Layout(tuple(axes)))  # as a layer that requires it
            loss = tf.reduce_sum(found * weights)
        return found, tape.gradient(loss, x)

    others = [("data", None, "model"), (None, None, None)] if value is VALUE else []
    for laid in (("data", "model", None), *others):
        computed = compute(devices.place(value, Layout(laid)), devices.place(weights, Layout(tuple(axes))))
        for found, right in zip(computed, (expected, gradient), strict=True):
            np.testing.assert_array_equal(devices.full_tensor(found), right, err_msg=f"{laid}")


@pytest.mark.parametrize("dtype", [tf.bool, tf.int32, tf.int64, tf.float32])
def test_other_dtypes(dtype, mesh2x2):
    devices, value = mesh2x2.devices, np.arange(8).reshape(4, 2) % 3
    laid = devices.place(tf.cast(value, dtype), Layout(("data", "model")))

    def compute(x):
        return tf.reverse(x, [0, 1]), x[::-2], tf.concat([x, x], -1), tf.slice(x, [1, 0], [2, -1]), tf.transpose(x)

    rights = (value[::-1, ::-1], value[::-2], np.concatenate([value, value], 1), value[1:3], value.T)
    for found, right in zip(on(mesh2x2, compute)(laid), rights, strict=True):
        np.testing.assert_array_equal(devices.full_tensor(found), tf.cast(right, dtype))


def on(mesh, function):
    """Returns a function that is traced within a step of a mesh."""

    def traced(*given):
        with mesh.layouts.tracing():
            return function(*given)

    return tf.function(traced, autograph=False)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((lambda axis=axis: tf.reverse(tf.zeros([2, 3, 4]), axis), ValueError) for axis in (1, [5], [1, 1], [1, -2])),
        (lambda: tf.slice(tf.ones([2, 3]), [0, 6], [2, -1]), ValueError),
        (lambda: tf.concat([], 0), ValueError),
        (lambda: tf.concat([tf.ones([2, 3]), tf.ones([2, 3], tf.int32)], 0), TypeError),
        (lambda: tf.concat([tf.ones([2, 3])] * 2, 2), ValueError),
        (lambda: tf.concat([tf.ones([2, 3])] * 2, 1.5), TypeError),
    ],
)
def test_a_wrong_call_is_refused_as_by_tensorflow(call, error, mesh2x2):
    messages = []
    for function in (tf.function(call, autograph=False), on(mesh2x2, call)):
        with pytest.raises(error) as raised:
            function.get_concrete_function()
        messages.append(str(raised.value).split(" for '")[0])  # without the names of tensors
    assert messages[0] == messages[1]


def test_a_slice_outside_of_a_tensor_is_refused(mesh2x2):
    with pytest.raises(tf.errors.InvalidArgumentError, match="Expected size"):
        on(mesh2x2, lambda x: tf.slice(x, [0, 3], [2, 2]))(tf.ones([2, 3]))


@pytest.mark.parametrize(
    ("operation", "axes", "what"),
    [
        (lambda x: x[:, ::-1], ("data", "model"), "a slice with strides"),
        (lambda x: tf.concat([x, x], -1), ("data", None), "a concatenation with a negative axis"),
    ],
)
def test_an_operation_that_is_not_laid_out_is_refused(operation, axes, what, mesh2x2):
    traced = tf.function(operation, autograph=False)
    traced(tf.constant(VALUE[..., 0]))
    laid = mesh2x2.devices.place(VALUE[..., 0], Layout(axes))
    with pytest.raises(InputError, match=f"^On a mesh, {what} must be traced within the step"):
        mesh2x2.compiled(lambda x: traced(x * 1))(laid)


@pytest.mark.parametrize(("shape", "is_refused"), [((8,), False), ((16,), True), ((4, 2), True)])
def test_a_concatenation_of_what_may_be_shapes_is_not_refused(shape, is_refused):
    """Of short vectors of integers: the same rule decides what is laid out."""

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.int32)], autograph=False)
    def concatenate(x):
        return tf.concat([x, x], -1), tf.concat([tf.constant([[1]]), tf.constant([[2]])], -1)

    graph = concatenate.get_concrete_function().graph
    with pytest.raises(InputError, match="negative axis") if is_refused else contextlib.nullcontext():
        reject_unsafe_operations(graph)


def test_slices_of_shapes_stay_constants(mesh2x2):
    laid = mesh2x2.devices.place(VALUE, Layout(("data", "model", None)))
    found = mesh2x2.compiled(lambda x: tf.reshape(x, [*tf.unstack(tf.shape(x)[::2]), 8]))(laid)
    np.testing.assert_array_equal(mesh2x2.devices.full_tensor(found), VALUE.reshape(4, 6, 8))


def patched():
    names = (
        (array_ops, "reverse"),
        (array_ops, "reverse_v2"),
        (gen_array_ops, "strided_slice"),
        (gen_array_ops, "_slice"),
        (gen_array_ops, "concat_v2"),
        (gen_array_ops, "transpose"),
        (gen_nn_ops, "top_kv2"),
    )
    return [tf.reverse, *(getattr(module, name) for module, name in names)]


def test_nothing_is_replaced_afterwards(mesh2x2):
    before = patched()
    with pytest.raises(KeyError), mesh2x2.layouts.tracing(), mesh2x2.layouts.tracing():
        assert all(now is not original for now, original in zip(patched(), before, strict=True))
        raise KeyError
    assert all(now is original for now, original in zip(patched(), before, strict=True))


def test_what_is_not_traced_is_as_ever(mesh2x2):
    """Data is read in other threads while a step is traced, and constants are computed in its initial scope."""
    found = []

    def read():
        data = tf.data.Dataset.from_tensors(VALUE).map(lambda x: tf.concat([tf.reverse(x[:, ::2], [0])], -1))
        found.extend([*data, tf.image.flip_up_down(VALUE), tf.constant(VALUE)[::-1]])

    @tf.function(autograph=False)
    def step(x):
        with mesh2x2.layouts.tracing():
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
            with tf.init_scope():
                found.append(tf.transpose(tf.concat([keras.ops.flip(tf.constant(VALUE), 0)], -1), [0, 1, 2]))
            return x + 1

    step(mesh2x2.devices.place(VALUE, Layout(("data", "model", None))))
    for each, right in zip(found, (VALUE[::-1, ::2], VALUE[::-1], VALUE[::-1], VALUE[::-1]), strict=True):
        np.testing.assert_array_equal(each, right)


def network():
    inputs = keras.Input((6, 6, 1))
    images = keras.layers.RandomFlip("horizontal", seed=1)(inputs)
    texts = keras.layers.Reshape((6, 6))(images)
    hidden = keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True, unroll=True))(texts)
    backwards = keras.layers.LSTM(4, go_backwards=True, unroll=True)(hidden)
    hidden = keras.layers.Concatenate()([backwards, keras.layers.Dense(4)(hidden[:, 0])])
    hidden = keras.layers.Lambda(lambda x: x[:, ::-1])(keras.layers.Dense(8, activation="relu")(hidden))
    return keras.Model(inputs, keras.layers.Dense(2, activation="sigmoid")(hidden))


def test_a_model_trains_and_is_evaluated_as_on_one_device(single, mesh2x2, mesh4x1, float64):
    random = np.random.default_rng(2)
    data = random.standard_normal((16, 6, 6, 1)), random.integers(0, 2, (16, 2))
    by_inputs = tfdist.load_strategy("mesh", mesh_shape="data:2;model:2", layout="in:model")
    found = []
    for strategy in (single, mesh2x2, mesh4x1, by_inputs):
        keras.utils.clear_session(free_memory=False)  # for equal names
        keras.utils.set_random_seed(11)
        with strategy.scope():
            curves = keras.metrics.AUC(), keras.metrics.AUC(curve="PR", name="pr")
            metrics = [*curves, keras.metrics.F1Score(threshold=0.5)]
            trainer = tfdist.Trainer(network(), optimizer="adam", loss="binary_crossentropy", metrics=metrics)
        trainer.fit(data, batch_size=8, steps=4)
        weights = {v.path: np.array(trainer.strategy.local(v.value)[0]) for v in trainer.model.variables}
        found.append((weights, trainer.evaluate(data, batch_size=8)))
    (weights, results), *others = found
    assert {"auc", "pr", "f1_score_1"} <= results.keys()
    for other_weights, other_results in others:
        for name, value in weights.items():
            np.testing.assert_allclose(other_weights[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
        for name, result in results.items():
            np.testing.assert_allclose(other_results[name], result, rtol=1e-9, err_msg=name)
