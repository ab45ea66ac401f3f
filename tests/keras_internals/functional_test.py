"""One test for each private API of Keras's functional models that is used: if a new version changes one, its test fails."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import keras_internals


class Own(keras.Sequential):
    def call(self, inputs, training=None, mask=None):
        return inputs


def functional():
    inputs = {"b": keras.Input((3,), name="b"), "a": keras.Input((1,), dtype="int32", name="a")}
    x = keras.layers.Dense(2, name="dense")(inputs["b"])
    return keras.Model(inputs, [x + 1.0, keras.layers.Flatten(name="flat")(inputs["a"])])


def test_a_call_of_a_model_runs_its_functional_model():
    model, dense = functional(), keras.layers.Dense(2)
    assert keras_internals.functional_of(model) is model
    sequential = keras.Sequential([keras.Input((3,)), dense])
    assert keras_internals.functional_of(sequential).layers[-1] is dense
    assert keras_internals.functional_of(keras.Sequential([dense])) is None
    assert keras_internals.functional_of(Own([keras.Input((3,)), dense])) is None
    assert keras_internals.functional_of(dense) is None
    assert keras_internals.is_transparent(model) and not keras_internals.is_rematerialized(model)
    with keras.RematScope("full"):
        model = functional()
    assert not keras_internals.is_transparent(model) and keras_internals.is_rematerialized(model)


def test_nodes_run_as_the_model_does():
    model = functional()
    given = dict(zip(keras_internals.input_names(model), [np.array([[2]]), np.ones((1, 3))], strict=True))
    assert list(given) == ["a", "b"]
    tensors = keras_internals.standardize_inputs(model, given)
    assert [x.dtype.name for x in tensors] == ["int32", "float32"]
    values = dict(zip(map(id, model.inputs), tensors, strict=True))
    for node in keras_internals.nodes_of(model):
        assert all(id(x) in values for x in node.inputs)
        args, kwargs = node.fill_in(values)
        outputs = keras_internals.operation_function(node.operation, training=False)(*args, **kwargs)
        values.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=True))
    found = keras_internals.pack_outputs(model, [values[id(x)] for x in model.outputs])
    for one, other in zip(found, model(given), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_sequential_model_casts_and_a_mask_stays():
    model = keras.Sequential([keras.Input((3,), dtype="float32"), keras.layers.Dense(1)])
    x = tf.ones((2, 3), tf.float64)
    [found] = keras_internals.standardize_inputs(model, x, tf.constant([True, False]))
    assert found.dtype == tf.float32
    assert keras_internals.mask_and_logits(found)[0].numpy().tolist() == [True, False]


def test_one_output_is_not_in_a_list():
    inputs = keras.Input((3,))
    assert keras_internals.pack_outputs(keras.Model(inputs, [inputs]), [7]) == 7


class Adds(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def call(self, x):
        self.add_loss(tf.reduce_sum(x))
        return x


@pytest.mark.filterwarnings("error")
def test_the_losses_of_a_body_are_those_of_its_last_call():
    adds = Adds()
    model = functional()

    def run(x, nothing, training):
        assert training and nothing is None
        return adds(adds(x)), None

    body = keras_internals.Body("body", model, [adds], run)
    x = tf.ones((2, 2))
    keras_internals.set_mask_and_logits(x, tf.constant([True, True]), None)
    for _ in range(2):
        found, _ = body(x, None, training=True)
        assert found is x  # neither converted nor without its mask
        assert [float(loss) for loss in keras_internals.data_losses(body)] == [4.0, 4.0]


def test_a_usage_scope_notes_variables_and_reads_no_values():
    normalization = keras.layers.BatchNormalization()
    normalization.build((None, 3))
    made = []

    def placeholder(variable):
        made.append(variable.path)
        return tf.zeros(variable.shape)

    scope = keras_internals.UsageScope(placeholder)
    with scope:
        normalization(tf.ones((2, 3)), training=True)
        assert float(normalization.gamma.value[0]) == 0.0
    assert {id(variable) for variable in scope.reads.values()} == set(map(id, normalization.variables))
    assert [variable.name for variable in scope.assigned.values()] == ["moving_mean", "moving_variance"]
    assert len(made) == 4 and float(normalization.gamma[0]) == 1.0


def test_a_variable_without_a_value_gets_that_of_keras():
    def dense():
        keras.utils.set_random_seed(1)
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
        return layer

    with keras_internals.deferred_creation([], lambda _: None):
        layer = dense()
    assert keras_internals.value_of(layer.kernel) is None
    keras_internals.initialize(layer.kernel)
    np.testing.assert_array_equal(layer.kernel, dense().kernel)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.standard_normal(),
        lambda: __import__("random").random(),
        lambda: keras.random.normal((1,)),
        lambda: tf.random.normal((1,)),
    ],
)
def test_a_draw_changes_the_states_of_the_generators(draw):
    keras.utils.set_random_seed(1)
    keras.random.normal((1,))
    before = keras_internals.states_of_generators()
    keras.random.normal((1,), seed=3)
    keras.initializers.GlorotUniform(4)((2, 2))
    assert keras_internals.states_of_generators() == before
    draw()
    assert keras_internals.states_of_generators() != before


def test_the_variables_of_metrics_of_layers():
    class Counting(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean(name="mean")

        def call(self, x):
            self.mean.update_state(x)
            return x

    model = keras.Sequential([keras.Input((3,)), Counting()])
    assert len(keras_internals.metrics_of_layers(model)) == 2


def test_a_trace_counts_its_operations():
    trace = keras_internals.new_trace()
    with trace.as_default():
        x = tf.compat.v1.placeholder("float32", [2])
        assert trace.version == 1
        tf.while_loop(lambda x: x[0] > 0, lambda x: [x - 1], [x])
        assert trace.version == len(trace.get_operations())
    assert "StatelessWhile" in {operation.type for operation in trace.get_operations()}
