"""Which stage has which variables, and their creation."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.pipelining.cut.example_models import MODELS, build
from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.pipelining.cutting import cut_model, initialize

pytestmark = pytest.mark.filterwarnings("ignore:.* was passed an input with a mask attached to it")


def paths(variables):
    return [variable.path for variable in variables]


@pytest.mark.parametrize("name", MODELS)
def test_each_variable_is_in_one_stage_unless_shared(name):
    model, _ = build(name)
    cut = cut_model(model, "auto", 3)
    owned = [variable for stage in cut.stages for variable in stage.variables.owned]
    assert sorted(map(id, owned)) == sorted(map(id, model.variables))
    held = [id(variable) for stage in cut.stages for variable in stage.variables.all]
    shared = {id(variable): stages for variable, stages in cut.shared}
    assert all(held.count(key) == len(shared.get(key, [0])) for key in held)


def test_tied_and_untied_variables():
    model, _ = build("tied")
    cut = cut_model(model, "block_0,block_2", 3)
    assert [(variable.path, stages) for variable, stages in cut.shared] == [("table/embeddings", (0, 2))]
    model, _ = build("untied")
    cut = cut_model(model, "dense", 2)
    assert not cut.shared
    assert paths(cut.stages[0].variables.all) == ["table/embeddings", "dense/kernel", "dense/bias"]
    assert paths(cut.stages[1].variables.all) == ["table/reverse_embeddings", "last/kernel", "last/bias"]


def test_a_variable_in_the_arguments_of_an_operation_is_shared():
    inputs = keras.Input((4,), dtype="int32")
    table = keras.layers.Embedding(5, 3, name="table")
    x = keras.layers.Dense(3, name="dense")(table(inputs))
    transposed = keras.layers.Lambda(lambda x: keras.ops.transpose(table.embeddings))(x)
    model = keras.Model(inputs, keras.ops.matmul(x, transposed))
    [(variable, stages)] = cut_model(model, "dense", 2).shared
    assert variable.path == "table/embeddings" and stages == (0, 1)


def test_state_belongs_to_the_stage_of_its_layer():
    inputs = keras.Input((4,))
    x = keras.layers.BatchNormalization(name="norm")(keras.layers.Dropout(0.5, name="drop")(inputs))
    model = keras.Model(inputs, keras.layers.Dropout(0.5, name="late")(keras.layers.Dense(2, name="dense")(x)))
    model.unused = keras.layers.Dense(1, name="unused")
    model.unused.build((None, 1))
    first, last = cut_model(model, "norm", 2).stages
    assert len(first.variables.trainable) == 2
    state = paths(v for v in first.variables.all if not v.trainable)
    assert {"norm/moving_mean", "norm/moving_variance"} < set(state) and len(state) == 3  # and that of the dropout
    assert {"unused/kernel", "dense/kernel"} < set(paths(last.variables.all))
    assert sum("seed" in path for path in paths(v for v in last.variables.all if not v.trainable)) == 1


def test_frozen_layers_send_no_gradients():
    model, _ = build("mlp")
    model.get_layer("hidden_0").trainable = False
    stages = cut_model(model, "hidden_0,hidden_1", 3).stages
    assert [[crossing.has_gradient for crossing in stage.sent] for stage in stages] == [[False], [True], []]
    assert not stages[0].variables.trainable and len(stages[0].variables.all) == 2


@pytest.mark.parametrize("name", ["cnn", "experts", "tied", "untied", "several", "nested", "sequential"])
def test_a_stage_draws_the_numbers_of_one_device_and_no_others_exist(name):
    whole = {variable.path: (variable.value.name, variable.numpy()) for variable in build(name)[0].variables}
    for stage in range(3):
        with keras_internals.deferred_weights():
            model, _ = build(name)
        cut = cut_model(model, "auto", 3)
        weights = [variable for variable in model.variables if keras_internals.value_of(variable) is None]
        assert set(paths(model.trainable_variables)) <= set(paths(weights))
        own = cut.stages[stage].variables
        initialize(own)
        made = [variable for variable in weights if keras_internals.value_of(variable) is not None]
        assert paths(made) == [path for path in paths(own.all) if path in paths(weights)]
        for variable in made:
            assert variable.value.name == whole[variable.path][0], "optimizers exclude variables by this name"
            np.testing.assert_array_equal(variable.numpy(), whole[variable.path][1])


def test_variables_that_have_values_keep_them():
    model, _ = build("mlp")
    model.set_weights([weight + 1 for weight in model.get_weights()])
    before = model.get_weights()
    for stage in cut_model(model, "auto", 2).stages:
        initialize(stage.variables)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "draw",
    [
        lambda shape, dtype: keras.random.normal(shape, dtype=dtype),
        lambda shape, dtype: np.random.standard_normal(shape),
        lambda shape, dtype: tf.random.normal(shape, dtype=dtype),
    ],
)
def test_initializers_without_a_seed_of_their_own_are_refused(draw):
    keras.utils.set_random_seed(1)
    with keras_internals.deferred_weights():
        layers = [keras.layers.Dense(2, kernel_initializer=draw, name=name) for name in "ab"]
        model = keras.Sequential([keras.Input((2,)), *layers])
    cut = cut_model(model, "a", 2)
    with pytest.raises(InputError, match=r"the initializer of (sequential.*/)?b/kernel, which draws from a global"):
        initialize(cut.stages[1].variables)
