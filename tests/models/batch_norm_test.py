"""Replacing one kind of batch normalization by another, in any model."""

import keras
import numpy as np
import pytest

from tfdist.errors import InputError
from tfdist.layers import SyncBatchNormalization
from tfdist.models import with_batch_norm

X = np.random.default_rng(0).normal(3.0, 2.0, size=(16, 4)).astype("float32")


def functional():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(5, name="dense")(inputs)
    norm = keras.layers.BatchNormalization(momentum=0.5, epsilon=0.01, center=False, name="norm")
    return keras.Model(inputs, [norm(x), norm(x * 2.0)])  # one layer, called twice


def nested():
    inner = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()], name="inner"
    )
    inputs = keras.Input((4,))
    frozen = keras.layers.BatchNormalization(name="frozen", trainable=False, beta_regularizer="l2")
    return keras.Model(inputs, keras.layers.Add()([inner(frozen(inputs)), keras.layers.Dense(3)(inputs)]))


def sequential():
    return keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(axis=-1), keras.layers.Dense(2)])


def unbuilt():
    return keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization()])


def of_type(model, kind):
    return [layer for layer in model._flatten_layers() if type(layer) is kind]


def randomize(model):
    rng = np.random.default_rng(1)
    for variable in model.variables:
        variable.assign(rng.uniform(0.5, 1.5, variable.shape))


@pytest.mark.parametrize("make", [functional, nested, sequential])
def test_there_and_back(make):
    model = make()
    randomize(model)
    expected = keras.tree.map_structure(np.array, model(X))
    synchronized = with_batch_norm(model, "synchronized")
    assert type(synchronized) is type(model)
    assert not of_type(synchronized, keras.layers.BatchNormalization)
    assert len(of_type(synchronized, SyncBatchNormalization)) == len(of_type(model, keras.layers.BatchNormalization))
    assert [v.path for v in synchronized.variables] == [v.path for v in model.variables]
    assert [v.path for v in synchronized.trainable_variables] == [v.path for v in model.trainable_variables]
    keras.tree.map_structure(np.testing.assert_array_equal, expected, synchronized(X))

    randomize(synchronized)
    expected = keras.tree.map_structure(np.array, synchronized(X))
    local = with_batch_norm(synchronized, "local")
    assert not of_type(local, SyncBatchNormalization)
    assert "tfdist" not in local.to_json()
    keras.tree.map_structure(np.testing.assert_array_equal, expected, local(X))


def test_options_of_the_layer_are_kept():
    layer = with_batch_norm(functional(), "synchronized").get_layer("norm")
    assert (layer.momentum, layer.epsilon, layer.center, layer.scale) == (0.5, 0.01, False, True)
    frozen = with_batch_norm(nested(), "synchronized").get_layer("frozen")
    assert not frozen.trainable
    assert frozen.beta_regularizer is not None


def test_a_model_without_weights_yet():
    model = with_batch_norm(unbuilt(), "synchronized")
    assert model(X, training=True).shape == (16, 3)
    assert len(of_type(model, SyncBatchNormalization)) == 1


def test_nothing_to_replace():
    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    own = Own()
    synchronized = sequential()
    assert with_batch_norm(plain, "synchronized") is plain
    assert with_batch_norm(own, "synchronized") is own
    assert with_batch_norm(synchronized, "local") is synchronized


class Normalizing:
    """Contains batch normalization."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization()

    def call(self, inputs):
        return self.norm(inputs)


class Block(Normalizing, keras.layers.Layer):
    """A user's layer."""


class Subclassed(Normalizing, keras.Model):
    """A subclassed model."""


def inside_a_layer():
    return keras.Sequential([keras.Input((4,)), Block()])


def renormalising():
    return keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(renorm=True)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Subclassed, "Received: subclassed.*Use tfdist.layers.SyncBatchNormalization instead of BatchNormalization"),
        (inside_a_layer, "belongs to a user-defined layer"),
        (renormalising, "Batch renormalization cannot be synchronized"),
    ],
)
def test_what_cannot_be_replaced(make, message):
    with pytest.raises(InputError, match=message) as error:
        with_batch_norm(make(), "synchronized")
    assert "\n" not in str(error.value)


def test_unknown_kind():
    with pytest.raises(InputError, match='"sync" is not known.* Known: local, synchronized'):
        with_batch_norm(sequential(), "sync")
