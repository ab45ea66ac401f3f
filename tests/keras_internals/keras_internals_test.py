"""One test for each private API of Keras and TensorFlow that is used: if a new version changes one, its test fails."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context

from tests.adding_loss import AddsLoss
from tfdist import keras_internals
from tfdist.errors import InputError

X = np.random.default_rng(0).standard_normal((5, 3)).astype("float32")
Y = np.array([0, 1, 0, 1, 1])
BATCH = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int64))
BATCH_OF_TWO = (BATCH[0], {"a": BATCH[1], "b": tf.TensorSpec([None, 2], tf.float32)})


def two_outputs():
    inputs = keras.Input((3,))
    a, b = (keras.layers.Dense(2, name=name)(inputs) for name in "ab")
    return keras.Model(inputs, {"b": b, "a": a})


def built(model=None, batch=BATCH, **options):
    model = model or keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    model.compile("adam", **({"loss": "sparse_categorical_crossentropy"} | options))
    keras_internals.build(model, batch)
    return model


def test_build_creates_every_variable():
    model = keras.Sequential([keras.layers.Dense(2)])  # without a known input
    built(model, metrics=["accuracy"])
    assert [v.shape for v in model.trainable_variables] == [(3, 2), (2,)]
    assert len(model.optimizer.variables) == 2 + 2 * 2  # iterations, learning rate, two slots each
    assert len(keras_internals.metrics_of(model)) == 1
    assert len(keras_internals.flat_losses(model)) == 1


def test_the_start_of_tensorflow_s_servers_has_a_deadline(monkeypatch):
    """Real processes in tests/end_to_end/exit_codes_test.py show that TensorFlow respects it."""
    current = keras_internals.tf_internals.context.context()
    monkeypatch.setattr(current, "_coordination_service_config", None)
    keras_internals.limit_start_of_workers(3, 1.5)
    config = current.config.experimental.coordination_config
    assert config.cluster_register_with_barrier
    assert config.cluster_register_timeout_in_ms == 1500
    assert [(job.name, job.num_tasks) for job in config.coordinated_job_list] == [("worker", 3)]
    cluster = tf.train.ClusterSpec({"worker": ["localhost:1", "localhost:2", "localhost:3"]})
    assert config.service_leader == multi_worker_util.coordination_leader(cluster)


def test_device_iterators_have_no_thread_that_tunes(mirrored2):
    """With autotuning, ending a fit could take as long again as the fit itself."""

    def tuned(iterator):
        on_devices = iterator._iterators[0]._iterator._device_iterators
        return [each._dataset.options().autotune.enabled for each in on_devices]

    engine = mirrored2.engine.distribute_datasets_from_function(lambda _: tf.data.Dataset.range(4))
    assert tuned(iter(engine)) == [None, None], "the engine switches it off by itself now"
    assert tuned(mirrored2.distribute(lambda replicas, size: tf.data.Dataset.range(4))) == [False, False]


def test_flat_losses_of_one_output_and_of_none():
    [flat] = keras_internals.flat_losses(built())
    assert flat.path == ()
    assert isinstance(flat.loss, keras.Loss)
    assert flat.weight is None
    assert flat.loss.reduction == "sum_over_batch_size"
    assert keras_internals.flat_losses(built(loss=None)) == []


def test_flat_losses_of_two_outputs_and_structures_that_are_brought_to_their_paths():
    losses = {"a": "sparse_categorical_crossentropy", "b": "mse"}
    model = built(two_outputs(), BATCH_OF_TWO, loss=losses, loss_weights={"a": 2.0, "b": 0.5})
    found = {flat.path: (flat.loss.name, flat.weight) for flat in keras_internals.flat_losses(model)}
    assert found == {("a",): ("sparse_categorical_crossentropy", 2.0), ("b",): ("mse", 0.5)}
    y_true, y_pred = keras_internals.match_structures(model, {"a": 1, "b": 2}, {"b": 4, "a": 3})
    assert (y_true["a"], y_true["b"], y_pred["a"], y_pred["b"]) == (1, 2, 3, 4)


@pytest.mark.parametrize("weight", [None, np.array([0.0, 1, 2, 3, 4], "float32")])
def test_loss_values_and_their_weighted_sum_are_those_of_a_loss(weight):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    logits = tf.constant(X[:, :2])
    values, mask = keras_internals.loss_values(loss, tf.constant(Y), logits)
    assert mask is None
    assert values.shape == (5,)
    total = keras_internals.weighted_sum(values, weight, mask, "float32")
    assert float(total) == float(loss(Y, logits, weight))


def test_masks_travel_with_tensors():
    tokens = tf.constant([[1, 2, 0], [3, 0, 0]])
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(4, 2, mask_zero=True)])
    outputs = model(tokens)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    values, mask = keras_internals.loss_values(loss, tf.zeros_like(outputs), outputs)
    np.testing.assert_array_equal(mask, [[True, True, False], [True, False, False]])
    assert float(keras_internals.weighted_sum(values, None, mask, "float32")) == pytest.approx(
        float(tf.reduce_sum(tf.where(mask, values, 0.0)))
    )
    assert float(keras_internals.sum_of_weights(None, mask, "float32")) == 3.0
    assert float(keras_internals.sum_of_weights(tf.constant([[2.0], [5.0]]), mask, "float32")) == 9.0
    assert float(keras_internals.sum_of_weights(tf.constant([2.0, 5.0]), None, "float32")) == 7.0


def test_labels_and_outputs_are_cast_as_the_loss_casts_them():
    loss = keras.losses.MeanSquaredError(dtype="float64")
    values, _ = keras_internals.loss_values(loss, tf.constant([[1]]), tf.constant([[0.5]]))
    assert values.dtype == tf.float64


def test_a_loss_whose_call_is_hidden_is_refused():
    class Own(keras.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return tf.constant(0.0)

        def call(self, y_true, y_pred):
            return y_pred

    with pytest.raises(InputError, match="Received: Own, which overrides `__call__`"):
        keras_internals.loss_values(Own(), tf.zeros(1), tf.zeros(1))


def test_layers_at_any_depth():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="deep")], name="inner")
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.ReLU(name="relu")])
    names = {layer.name for layer in keras_internals.layers_of(model)}
    assert {"inner", "deep", "relu"} <= names - {model.name} == names


def test_losses_of_weights_and_of_data_are_separate():
    dense = keras.layers.Dense(
        2, kernel_regularizer=keras.regularizers.L1(0.5), kernel_initializer="ones", activity_regularizer="l1"
    )
    model = keras.Sequential([keras.Input((3,)), dense, AddsLoss(lambda x: 7.0 * keras.ops.mean(x))])
    x = tf.ones([4, 3])
    model(x)
    assert [float(loss) for loss in keras_internals.weight_losses(model)] == [0.5 * 6]
    # Keras divides an activity regularizer's loss by the number of rows: 0.01 * 4 * 2 * 3 / 4
    assert sorted(float(loss) for loss in keras_internals.data_losses(model)) == pytest.approx([0.06, 21.0])
    model(x * 2)
    assert len(keras_internals.data_losses(model)) == 2, "those of the last forward pass alone"
    assert sum(map(float, model.losses)) == pytest.approx(3.0 + 2 * 0.06 * 1 + 42.0)
    assert [len(keras_internals.pop_data_losses(model)) for _ in range(2)] == [2, 0]


def test_metrics_are_updated_and_read_from_given_values():
    model = built(metrics=["accuracy"], weighted_metrics=["sparse_categorical_crossentropy"])
    assert len(keras_internals.metrics_of(model)) == 2
    prediction = tf.constant([[0.9, 0.1]] * 5)
    keras_internals.update_metrics(model, tf.constant(Y), prediction, tf.constant([1.0, 0, 0, 0, 0]))
    values = [v.numpy() for metric in keras_internals.metrics_of(model) for v in metric.variables]
    results = keras_internals.metric_results(model, values)
    assert results["accuracy"] == pytest.approx(2 / 5)
    assert results["sparse_categorical_crossentropy"] == pytest.approx(-np.log(0.9), rel=1e-5)
    doubled = keras_internals.metric_results(model, [2 * value for value in values])
    assert doubled == pytest.approx(results)
    other = keras_internals.metric_results(model, [np.float64(3), np.float64(4), np.float64(1), np.float64(2)])
    assert list(other.values()) == [0.75, 0.5]
    assert all(isinstance(value, float) for value in other.values())


def test_names_of_metrics_are_those_of_keras_logs_if_there_are_any():
    losses = {"a": "sparse_categorical_crossentropy", "b": "mse"}
    model = built(two_outputs(), BATCH_OF_TWO, loss=losses, metrics={"a": ["accuracy"], "b": ["mae"]})
    values = [np.ones(v.shape) for metric in keras_internals.metrics_of(model) for v in metric.variables]
    ours = keras_internals.metric_results(model, values)
    logs = model.evaluate(X, {"a": Y, "b": X[:, :2]}, return_dict=True, verbose=0)
    assert set(ours) == {"a_accuracy", "b_mae"} == {name for name in logs if not name.endswith("loss")}
    model = built()  # without metrics
    keras_internals.update_metrics(model, tf.constant(Y), tf.zeros([5, 2]), None)
    assert keras_internals.metrics_of(model) == []
    assert keras_internals.metric_results(model, []) == {}


def test_the_creation_of_variables_is_deferred():
    """Reads, assignments and shapes work before creation; a model that is traced has its variables immediately."""
    abstract_model, at_once = [], []

    def initialize(uninitialized):
        at_once.append(uninitialized)
        keras_internals.set_tf_variable(
            uninitialized.variable, tf.Variable(keras_internals.initial_value(uninitialized.variable))
        )

    with keras_internals.deferred_creation(abstract_model, initialize):
        dense = keras.layers.Dense(2, name="dense")
        dense.build((None, 3))
        assert keras_internals.value_of(dense.kernel) is None and dense.kernel.shape == (3, 2)
        dense.bias.assign([1.0, 2.0])
        np.testing.assert_array_equal(dense.bias, [1.0, 2.0])
        traced = keras.Sequential([keras.layers.Dense(2)])
        traced.compile("sgd", "mse")
        keras_internals.build(traced, BATCH)
    assert [uninitialized.variable.name for uninitialized in abstract_model[:2]] == ["kernel", "bias"]
    assert abstract_model[0].owners[-1] is dense
    assert {uninitialized.variable.path for uninitialized in at_once} >= {v.path for v in traced.trainable_variables}
    for uninitialized in abstract_model:
        initialize(uninitialized)
    np.testing.assert_array_equal(keras_internals.value_of(dense.bias), [1.0, 2.0])
    assert isinstance(keras.Variable([1.0]).value, tf.Variable)  # unchanged outside the context


def test_masks_are_copied_through_a_function():
    tensor, other = tf.ones([2]), tf.ones([2])
    keras_internals.set_mask_and_logits(other, tf.constant([True, False]), None)
    found = keras_internals.copy_mask_and_logits(tensor, other, tf.logical_not)
    np.testing.assert_array_equal(keras_internals.mask_and_logits(found)[0], [False, True])


def test_operations_of_a_graph_and_of_what_it_calls():
    @tf.function(autograph=False)
    def loop(x):
        return tf.while_loop(
            lambda x: x < 3.0, lambda x: tf.cond(x > 1.0, lambda: tf.sqrt(x) + 1.0, lambda: x + 1.0), [x]
        )

    graph = loop.get_concrete_function(tf.constant(0.0)).graph
    assert {"Sqrt", "AddV2", "Less"} <= {operation.type for operation in keras_internals.operations_of(graph)}


def test_a_condition_or_loop_is_in_the_function_of_a_tensor_and_a_called_function_is_not():
    found = {}

    @tf.function(autograph=False)
    def outer(x):
        def note(name):
            found[name] = keras_internals.is_in_current_function(x)
            return x

        tf.cond(x > 0, lambda: note("condition"), lambda: x)
        tf.while_loop(lambda i: i < 1, lambda i: (i + tf.cond(x > 0, lambda: note("loop"), lambda: x),), (x,))
        tf.function(lambda: note("function"), autograph=False)()
        return note("itself")

    outer(tf.constant(0.0))
    assert found == {"condition": True, "loop": True, "function": False, "itself": True}


def test_the_layers_that_added_the_losses_of_a_scope():
    inner = keras.layers.Dense(2, activity_regularizer="l2")
    outer = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), inner])
    with keras_internals.RecordedScope([]) as scope:
        outer(tf.ones([2, 3]))
    assert keras_internals.layers_adding_losses(outer, scope.losses) == [inner]


def test_the_source_of_a_variable_s_value():
    variable = keras.Variable(2.0)
    assert float(keras_internals.source_value(variable)) == 2.0
    with keras_internals.RecordedScope([(variable, tf.constant(4.0))], [(variable, tf.constant(3.0))]):
        assert (float(variable.value), float(keras_internals.source_value(variable))) == (4.0, 3.0)
        with keras_internals.RecordedScope([(variable, tf.constant(5.0))]):
            assert float(keras_internals.source_value(variable)) == 5.0


def test_tapes_do_not_record():
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with keras_internals.without_gradient_recording():
            square = x * x
        both = square + x
    assert float(tape.gradient(both, x)) == 1.0


def test_a_metric_s_variable_is_read_without_the_other_copies(mirrored2):
    with mirrored2.scope():
        variables = keras.metrics.Sum().variables
    mirrored2.run(lambda: variables[0].assign(3.0))
    assert np.asarray(variables[0]) == 6  # the sum of both copies
    keras_internals.read_first_copy_outside(variables[0])
    assert np.asarray(variables[0]) == 3


def test_the_strategy_of_a_model_is_cleared(mirrored2):
    """With a strategy, Keras's fit would begin an unused pass over the data."""
    with mirrored2.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert model.distribute_strategy is mirrored2.engine
    keras_internals.clear_strategy(model)
    assert model.distribute_strategy is tf.distribute.get_strategy()
    assert model._distribute_strategy is None


def test_each_compilation_is_another_object():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert keras_internals.compilation(model) is None
    found = []
    for _ in range(2):
        model.compile("sgd", "mse")
        found.append(keras_internals.compilation(model))
    assert found[0] is not None and found[0] is not found[1]


def test_the_global_seed():
    tf.random.set_seed(12)
    assert keras_internals.global_seed() == 12


def test_functions_are_compiled_without_the_memory_optimizer():
    def within():
        with keras_internals.without_memory_optimizer():
            return context.context().function_call_options

    def settings(options):
        return tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)

    before, first = settings(context.context().function_call_options), within()
    assert settings(context.context().function_call_options) == before != settings(first)
    before.graph_options.rewrite_options.memory_optimization = before.graph_options.rewrite_options.NO_MEM_OPT
    assert settings(first) == before
    with context.function_executor_type("other"):
        assert within().executor_type == "other"
    assert within() is first, "the options are cached"


def test_the_means_of_losses():
    model = built(two_outputs(), (BATCH[0], {"a": BATCH[1], "b": BATCH[1]}))
    assert [mean.name for mean in keras_internals.loss_means(model)] == ["loss", "b_loss", "a_loss"]
    assert [flat.path for flat in keras_internals.flat_losses(model)] == [("b",), ("a",)]
    assert [mean.name for mean in keras_internals.loss_means(built())] == ["loss"]


def test_a_step_is_traced_without_effects():
    model = built(metrics=["accuracy"])
    before = [np.array(v) for v in (*model.variables, *keras_internals.metric_variables(model))]
    seen = []

    def step(batch):
        seen.append([tensor.shape.as_list() for tensor in batch])
        return model.compute_metrics(batch[0], batch[1], model(batch[0], training=True))

    keras_internals.trace_symbolically(step, BATCH)
    assert seen and all(isinstance(shape, list) for shape in seen[0])
    after = [np.array(v) for v in (*model.variables, *keras_internals.metric_variables(model))]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_only_outermost_calls_of_layers_that_compute_are_checked(monkeypatch):
    monkeypatch.setattr(keras.Layer, "__call__", keras.Layer.__call__)
    called = []
    keras_internals.check_layer_calls(lambda layer, inputs: called.append(layer.name))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")], name="whole")
    built(model)
    assert called == []
    model(X)
    model.get_layer("dense")(X)
    tf.function(model)(X)
    assert called == ["whole", "dense", "whole"]


def test_recorded_scopes_are_nested():
    variable, other = keras.Variable(1.0), keras.Variable(1.0)
    with keras_internals.RecordedScope(()) as outer:
        variable.assign(2.0)
        with keras_internals.RecordedScope([(other, 5.0)]) as inner:
            assert float(variable.value) == 2.0
            variable.assign(variable + 1.0)
            assert float(other.value) == 5.0
        [(assigned, value)] = inner.assignments
        assert assigned is variable and float(value) == 3.0
        assert float(variable.value) == 2.0
        assigned.assign(value)
    assert [float(value) for _, value in outer.assignments] == [3.0]
    assert float(variable.value) == 1.0


def test_a_loss_is_known_by_name_with_its_arguments():
    own = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    name, options = keras_internals.loss_form(own)
    assert name == "sparse_categorical_crossentropy" and options["from_logits"] is True
    for loss in ("binary_crossentropy", keras.losses.binary_crossentropy):
        [flat] = keras_internals.flat_losses(built(loss=loss, batch=(BATCH[0], tf.TensorSpec([None, 2]))))
        assert keras_internals.loss_form(flat.loss)[0] == "binary_crossentropy"

    def binary_crossentropy(y, outputs):
        return keras.ops.mean(y - outputs, -1)

    [flat] = keras_internals.flat_losses(built(loss=binary_crossentropy, batch=(BATCH[0], tf.TensorSpec([None, 2]))))
    assert keras_internals.loss_form(flat.loss) == ("", {})


def test_the_losses_of_a_model_that_is_not_built():
    model = two_outputs()
    model.compile(loss={"a": "binary_crossentropy", "b": keras.losses.Huber()})
    names = [keras_internals.loss_form(loss)[0] for loss in keras_internals.user_losses(model)]
    assert names == ["binary_crossentropy", "huber"]
    model = two_outputs()
    model.compile(loss=["crossentropy", None])  # which one depends on the shape of the labels
    assert [keras_internals.loss_form(loss) for loss in keras_internals.user_losses(model)] == [("", {})]
    model = two_outputs()
    model.compile()
    assert keras_internals.user_losses(model) == []


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (keras.layers.Dense(2), "linear"),
        (keras.layers.Dense(2, activation="softmax"), "softmax"),
        (keras.layers.Softmax(), "softmax"),
        (keras.layers.Activation("sigmoid"), "sigmoid"),
        (keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")]), "softmax"),
        (keras.layers.Dropout(0.1), None),
    ],
)
def test_the_last_activation(last, expected):
    model = keras.Sequential([keras.Input((3,)), last])
    assert keras_internals.last_activation(model.outputs[0]) == expected
