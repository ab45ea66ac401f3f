"""Private API of Keras that says which loss a model has, and with which activation its outputs end."""

import keras
import pytest
import tensorflow as tf

from tests.keras_internals.keras_internals_test import BATCH, built, two_outputs
from tfdist import keras_internals


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
