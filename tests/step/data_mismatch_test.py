import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import keras_internals
from tfdist.errors import InputError

X, Y = np.zeros((8, 3), "float32"), np.zeros(8, "int64")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Unknown(keras.Model):
    """A model whose outputs are known only when it is called, so that labels are not checked before the first step."""

    def __init__(self, layers):
        super().__init__()
        self.inside = keras.Sequential(layers)

    def call(self, inputs):
        return self.inside(inputs)


def fit(*layers, x=X, y=Y, loss=LOSS, data=None, devices=1, make=None, **given):
    strategy = tfdist.load_strategy("mirrored", devices=devices) if devices > 1 else tfdist.load_strategy("single")
    with strategy.scope():
        model = (make or keras.Sequential)([keras.layers.Input([3]), *layers])
        trainer = tfdist.Trainer(model, optimizer="sgd", loss=loss, **given)
    trainer.fit(data or (x, y), batch_size=8, steps=1)


class Printed(keras.layers.Layer):
    """Adds 0 via a string, for which XLA has no kernel."""

    def call(self, inputs):
        written = tf.strings.as_string(inputs[0, 0])
        return inputs + 0 * tf.cast(tf.strings.length(written), inputs.dtype)


def refused(*layers, **given):
    with pytest.raises(InputError) as raised:
        fit(*layers, **given)
    text = str(raised.value)
    assert "\n" not in text and text.startswith("Model, loss and metrics must fit the data. Received: examples with x ")
    assert raised.value.__cause__ is not None
    return text


def test_examples_of_another_shape_than_the_model_s():
    text = refused(keras.layers.Dense(2), x=np.zeros((8, 4), "float32"))
    assert "x float32[4], y int64[]" in text and ".py" not in text


def test_a_loss_that_wants_other_labels():
    assert "y int64[]" in refused(keras.layers.Dense(2), loss=keras.losses.CategoricalCrossentropy(), make=Unknown)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_label_that_is_no_class_says_the_range_without_the_batch_or_files_of_libraries(devices):
    with pytest.raises(InputError) as raised:
        fit(keras.layers.Dense(2), y=Y + 5, make=Unknown, devices=devices)
    text = str(raised.value)
    assert text.startswith("Labels must be in 0..1, because the model's output has 2 classes. Received: 5.")
    assert "step 0" in text
    assert "\n" not in text and ".py" not in text and "Label values" not in text


def test_what_xla_cannot_compile_is_told_with_its_flag():
    fit(Printed(), keras.layers.Dense(2))
    with pytest.raises(InputError, match="^jit_compile requires .*AsString"):
        fit(Printed(), keras.layers.Dense(2), jit_compile=True)


def test_what_reading_the_data_raises_stays_as_it_is():
    def rows():
        yield from zip(X[:4], Y, strict=False)
        raise ValueError("row 4 is corrupt")

    data = tf.data.Dataset.from_generator(rows, output_signature=(tf.TensorSpec([3]), tf.TensorSpec([], tf.int64)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 4 is corrupt"):
        fit(keras.layers.Dense(2), data=data.apply(tf.data.experimental.assert_cardinality(8)))


def test_what_a_codec_raises_stays_as_it_is(monkeypatch):
    def reduce(*_, **__):
        return tf.ensure_shape(tf.zeros([2]), [3])

    monkeypatch.setattr("tfdist.gradients.bucket.Bucketed.reduce", reduce)
    with pytest.raises(ValueError, match="not compatible|must be equal|Shape") as raised:
        fit(keras.layers.Dense(2))
    assert not isinstance(raised.value, InputError)


def test_keras_s_advice_to_build_by_hand_does_not_hide_the_cause():
    class Keyed(keras.Model):
        def call(self, inputs):
            return {}["missing"]

    strategy = tfdist.load_strategy("single")
    with strategy.scope():
        trainer = tfdist.Trainer(Keyed(), optimizer="sgd", loss=LOSS)
    with pytest.raises(KeyError, match="missing"):
        trainer.fit((X, Y), batch_size=8, steps=1)


def test_what_a_user_s_own_code_raises_keeps_its_traceback(monkeypatch):
    def raising(*_, **__):
        raise ValueError("my own mistake")

    monkeypatch.setattr("tfdist.keras_internals.build", raising)
    with pytest.raises(ValueError, match="my own mistake") as raised:
        fit(keras.layers.Dense(2))
    assert not isinstance(raised.value, InputError)


def test_examples_of_another_shape_where_calls_of_layers_are_checked(monkeypatch):
    """As in a process with a mesh."""
    monkeypatch.setattr(keras.Layer, "__call__", keras.Layer.__call__)
    keras_internals.check_layer_calls(lambda layer, inputs: None)
    assert "x float32[4], y int64[]" in refused(keras.layers.Dense(2), x=np.zeros((8, 4), "float32"))
