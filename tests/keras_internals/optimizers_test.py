"""One test for each private API of Keras's optimizers and callbacks that is used: a new version that changes one fails here."""

import ast
import inspect
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import keras_internals
from tfdist.keras_internals.fitting import _STATE_ATTRIBUTES


def test_keras_sums_gradients_over_replicas_unless_it_is_switched_off(mirrored2):
    """Even those that are already reduced, so that `Trainer.build` switches it off."""

    def weight_after_a_step(off):
        with mirrored2.scope():
            variable = keras.Variable([0.0, 0.0])
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([variable])
        if off:
            keras_internals.disable_gradient_aggregation(optimizer)
        tf.function(lambda: mirrored2.run(lambda: optimizer.apply([tf.constant([1.0, 2.0])], [variable])))()
        return [value.numpy().tolist() for value in mirrored2.local(variable.value)]

    assert weight_after_a_step(off=False) == [[-2.0, -4.0]] * 2
    assert weight_after_a_step(off=True) == [[-1.0, -2.0]] * 2
    # The replaced function takes pairs of gradient and variable, and returns a list of pairs.
    original = keras.optimizers.SGD()._all_reduce_sum_gradients
    assert list(inspect.signature(original).parameters) == ["grads_and_vars"]
    pair = (tf.constant(1.0), keras.Variable(1.0))
    assert [tuple(p) for p in original([pair])] == [pair]


def test_slots_have_the_layout_of_their_variable():
    variable = keras.Variable([1.0])
    keras_internals.set_layout(variable, "a layout")
    adam = keras.optimizers.Adam()
    adam.build([variable])
    assert [keras_internals.layout_of(v) for v in adam.variables] == [None, None, "a layout", "a layout"]


@pytest.mark.parametrize(
    "optimizer", ["sgd", "adamw", "adafactor", "lion", "rmsprop", "nadam", "adamax", "adagrad", "ftrl"]
)
def test_an_update_without_effects_is_the_update(optimizer):
    def updated(pure):
        with keras.name_scope("layer"):
            variable = keras.Variable([1.0, -2.0])
        made = keras.optimizers.get(optimizer)
        made.exclude_from_weight_decay(var_names=["^layer/"])
        made.build([variable])
        gradient = tf.constant([0.5, 0.25])
        if not pure:
            made.apply([gradient], [variable])
            return np.array(variable)
        before = [(v, tf.convert_to_tensor(v.value)) for v in (variable, *made.variables)]
        with keras_internals.stateless_updates(), keras.StatelessScope(before) as scope:
            made.apply([gradient], [variable])
        np.testing.assert_array_equal(variable, [1.0, -2.0])
        assert int(made.iterations) == 0
        return np.array(scope.get_current_value(variable))

    np.testing.assert_allclose(updated(True), updated(False), rtol=1e-6)


def test_the_variables_that_an_optimizer_was_built_for():
    optimizer, variables = keras.optimizers.Adam(), [keras.Variable([1.0]), keras.Variable([2.0, 3.0])]
    assert keras_internals.trained_variables(optimizer) == []
    optimizer.build(variables)
    assert [v.path for v in keras_internals.trained_variables(optimizer)] == [v.path for v in variables]


@pytest.mark.parametrize(
    ("optimizer", "count"),
    [
        (keras.optimizers.SGD(momentum=0.9), 2),
        (keras.optimizers.SGD(), 0),
        (keras.optimizers.RMSprop(momentum=0.9), 2),
        (keras.optimizers.Adam(), 0),
    ],
)
def test_velocities_are_slots_of_the_gradients_times_rates(optimizer, count):
    """After a step with a gradient of 1, they are as large as the rate, and not zero."""

    def velocities(rate):
        made = type(optimizer).from_config(optimizer.get_config() | {"learning_rate": rate})
        variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
        made.build(variables)
        made.apply([tf.ones([2]), tf.ones([1])], variables)
        return [slot.numpy() for slot in keras_internals.velocities_of(made)]

    slots, doubled = velocities(0.1), velocities(0.2)
    assert [slot.shape for slot in slots] == [(2,), (1,)][:count]
    for slot, twice in zip(slots, doubled, strict=True):
        assert np.all(slot != 0)
        np.testing.assert_allclose(twice, 2 * slot, rtol=1e-6)


def test_weights_are_averaged_from_the_first_update_on():
    variables = [keras.Variable(np.ones(2)), keras.Variable(np.ones(3))]
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.75)
    optimizer.build(variables)
    assert [pair[0] for pair in keras_internals.weight_averages(optimizer)] == variables
    for _ in range(2):  # weights of 0.5, then 0.0
        optimizer.apply([np.ones(2), np.ones(3)], variables)
    for _, average in keras_internals.weight_averages(optimizer):
        np.testing.assert_allclose(average, 0.75 * 0.5 * np.ones(average.shape))
    plain = keras.optimizers.SGD(0.5)
    plain.build(variables)
    assert keras_internals.weight_averages(plain) == []


@pytest.mark.parametrize(
    ("rate", "last", "constant"),
    [
        (0.5, 0.5, 0.5),
        (lambda: 0.5, 0.5, None),
        (lambda: tf.constant(0.5), 0.5, None),
        (keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5), 0.25, None),
    ],
    ids=["number", "function of a number", "function of a tensor", "schedule"],
)
def test_the_last_and_the_constant_learning_rate(rate, last, constant):
    optimizer = keras.optimizers.SGD(rate)
    variable = keras.Variable(0.0)
    for _ in range(2):
        optimizer.apply([tf.constant(1.0)], [variable])
    assert keras_internals.last_learning_rate(optimizer) == last
    assert keras_internals.scheduled_learning_rate(optimizer) is (rate if last == 0.25 else None)
    assert keras_internals.constant_learning_rate(optimizer) == constant


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "ftrl", "nadam", "rmsprop", "adadelta", "lion", "adamax"])
def test_slots_begin_with_their_initial_values(name):
    variable = keras.Variable([1.0, -2.0])
    optimizer = keras.optimizers.get(name)
    optimizer.use_ema = True
    optimizer.build([variable])
    slots = keras_internals.slots(optimizer)
    assert not {id(optimizer.iterations), id(optimizer._learning_rate)} & {id(slot) for slot in slots}
    assert not {id(average) for _, average in keras_internals.weight_averages(optimizer)} & {id(slot) for slot in slots}
    for slot, initial in zip(slots, keras_internals.initial_slot_values(optimizer), strict=True):
        np.testing.assert_allclose(slot, np.full(slot.shape, initial), rtol=1e-6)


def test_state_that_begins_as_a_copy_of_the_weights_has_no_initial_value():
    optimizer = keras.optimizers.ScheduleFreeAdamW()
    variable = keras.Variable([1.0, -2.0])
    optimizer.build([variable])
    np.testing.assert_array_equal(keras_internals.slots(optimizer)[0], variable)
    assert keras_internals.state_starts_from_weights(optimizer)
    assert keras_internals.initial_slot_values(optimizer) is None
    assert not keras_internals.state_starts_from_weights(keras.optimizers.AdamW())


class _Own(keras.optimizers.Optimizer):
    """A user's optimizer, whose state begins at a value of an initializer."""

    def __init__(self, initializer):
        super().__init__(0.1)
        self._initializer = initializer

    def build(self, variables):
        """Creates the state."""
        super().build(variables)
        self._state = [self.add_variable_from_reference(v, "state", self._initializer) for v in variables]


@pytest.mark.parametrize(
    ("initializer", "values"), [("ones", [1.0]), (keras.initializers.Constant(0.5), [0.5]), ("random_normal", None)]
)
def test_initial_values_of_an_own_optimizer(initializer, values):
    optimizer = _Own(initializer)
    optimizer.build([keras.Variable([1.0, -2.0])])
    assert keras_internals.initial_slot_values(optimizer) == values
    optimizer.iterations.assign(1)
    assert keras_internals.initial_slot_values(optimizer) is None


def test_an_update_of_own_copies_changes_no_other_replica(mirrored2):
    with mirrored2.scope():
        variable = keras.Variable([1.0, 1.0])
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        optimizer.build([variable])

    def update():
        rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        with keras_internals.own_copies([variable, *optimizer.variables]), keras_internals.updating_own_copies():
            optimizer.apply([tf.fill([2], rank)], [variable])

    before = variable.value
    tf.function(lambda: mirrored2.run(update), autograph=False)()
    assert variable.value is before
    assert [value.numpy().tolist() for value in mirrored2.local(variable.value)] == [[1.0, 1.0], [0.5, 0.5]]
    [_, momentum] = [v for v in optimizer.variables if v.path.endswith(("iteration", "momentum"))]
    assert [value.numpy().tolist() for value in mirrored2.local(momentum.value)] == [[0.0, 0.0], [-0.5, -0.5]]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "lion", "muon", "ftrl"])
def test_paths_of_state_name_the_trained_variable(optimizer):
    """Adafactor gives the factors of all kernels one path, which would name others in another part of the model."""

    def paths(*layers):
        layers = [keras.layers.Dense(3, name=name) for name in layers]
        model = keras.Sequential([keras.Input((3,)), *layers], name="model")
        made = keras.optimizers.get(optimizer)
        made.build(model.trainable_variables)
        found = keras_internals.paths_of_state(made)
        assert len(found) == len(set(found)) == len(made.variables)
        return {path.partition("/")[2] for path in found}, {v.path.partition("/")[2] for v in made.variables}

    both, of_keras = paths("one", "two")
    assert both == paths("one")[0] | paths("two")[0]
    assert both == of_keras or optimizer == "adafactor"


# Attributes that are assigned there are set again by each start.
OF_THE_PROGRAM = {"__init__", "_init_profile_batch", "set_model", "set_params"}
NOT_STATE = {
    # Set when the metrics are known; it determines the sign of `min_delta`.
    "MonitorCallback": {"monitor_op", "min_delta"},
    # Set by `on_epoch_begin`, which is called again.
    "ModelCheckpoint": {"_current_epoch"},
    # An open file, and its columns.
    "CSVLogger": {"append_header", "csv_file", "keys", "writer"},
    # The terminal.
    "ProgbarLogger": {"_called_in_fit", "progbar", "seen", "target"},
    # Times, open writers, a running profile, and a graph that each start writes once.
    "TensorBoard": {
        "_batch_start_time",
        "_batch_trace_context",
        "_epoch_start_time",
        "_is_tracing",
        "_previous_epoch_iterations",
        "_profiler_started",
        "_should_write_train_graph",
        "_summary_module",
    },
}
CALLBACKS = [
    kind
    for kind in vars(keras.callbacks).values()
    if inspect.isclass(kind) and issubclass(kind, keras.callbacks.Callback) and kind is not keras.callbacks.Callback
]


def changed_in_training(kind):
    """Returns the attributes that methods assign, by the class that defines the methods."""
    found = {}
    for one in (base for base in kind.__mro__ if base.__module__.startswith("keras.")):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        methods = [method for method in tree.body if getattr(method, "name", "__init__") not in OF_THE_PROGRAM]
        stores = (node for method in methods for node in ast.walk(method) if isinstance(node, ast.Attribute))
        found[one.__name__] = {
            node.attr for node in stores if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
    return found


@pytest.mark.parametrize("kind", [kind for kind in CALLBACKS if kind.__name__ != "CallbackList"])
def test_every_attribute_that_training_assigns_is_state_or_is_named_here(kind):
    changed = changed_in_training(kind)
    changed.pop("Callback", None)
    left = {name for owner, names in changed.items() for name in names - NOT_STATE.get(owner, set())}
    in_place = {"history"} if kind is keras.callbacks.History else set()
    assert left | in_place == set(_STATE_ATTRIBUTES.get(kind, ()))


def test_nothing_else_is_set():
    backup = keras.callbacks.BackupAndRestore("mine")
    keras_internals.restore_callback(
        backup, {"backup_dir": "src", "_weights_path": "x", "_current_epoch": 2, "more": 1}
    )
    assert (backup.backup_dir, backup._weights_path, backup._current_epoch) == ("mine", "mine/latest.weights.h5", 2)
    assert not hasattr(backup, "more")


def test_a_best_value_has_its_comparison():
    """`ModelCheckpoint` may compare before the end of an epoch; the sign of `min_delta` must change only once."""
    best = keras.callbacks.ModelCheckpoint("best.keras", "loss", save_best_only=True, save_freq=2)
    for _ in range(2):
        keras_internals.restore_callback(best, {"best": 0.5})
    assert best._is_improvement(0.4, best.best) and not best._is_improvement(0.6, best.best)
    stop = keras.callbacks.EarlyStopping("loss", min_delta=0.25)
    for _ in range(2):
        stop.on_train_begin()
        keras_internals.restore_callback(stop, {"best": 0.5})
    assert stop.min_delta == -0.25


@pytest.mark.parametrize(
    ("metric", "mode", "direction"),
    [
        *(("val_loss", "auto", "min"), ("val_accuracy", "auto", "max"), ("accuracy", "auto", "max")),
        *(("val_mean_absolute_error", "auto", "min"), ("val_accuracy", "min", "min"), ("val_other", "auto", "")),
    ],
)
def test_what_is_better_is_inferred_as_by_keras(metric, mode, direction):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse", metrics=["accuracy", "mean_absolute_error"])
    model.test_on_batch(np.zeros((1, 2)), np.zeros((1, 1)))
    callback = keras.callbacks.EarlyStopping(metric, min_delta=0.5, mode=mode)
    callback.set_model(model)
    assert [keras_internals.monitored_direction(callback) for _ in range(2)] == [direction] * 2
    assert callback.min_delta == (-0.5 if direction == "min" else 0.5)
