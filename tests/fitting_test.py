import keras
import numpy as np
import pytest

import tfdist
from tfdist.errors import InputError

X, Y = np.zeros((8, 3), "float32"), np.zeros(8, "int64")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(*layers, x=X, y=Y, loss=LOSS):
    strategy = tfdist.load_strategy("single")
    with strategy.scope():
        trainer = tfdist.Trainer(keras.Sequential([keras.layers.Input([3]), *layers]), optimizer="sgd", loss=loss)
    trainer.fit((x, y), batch_size=8, steps=1)


def refused(*layers, **given):
    with pytest.raises(InputError) as raised:
        fit(*layers, **given)
    text = str(raised.value)
    assert "\n" not in text and text.startswith("Model, loss and metrics must fit the data. Received: examples with x ")
    assert raised.value.__cause__ is not None
    return text


def test_what_fits_is_let_through():
    fit(keras.layers.Dense(2))


def test_examples_of_another_shape_than_the_model_s():
    assert "x float32[4], y int64[]" in refused(keras.layers.Dense(2), x=np.zeros((8, 4), "float32"))


def test_a_loss_that_wants_other_labels():
    assert "y int64[]" in refused(keras.layers.Dense(2), loss=keras.losses.CategoricalCrossentropy())


def test_a_label_that_is_no_class():
    assert "outside the valid range of [0, 2)" in refused(keras.layers.Dense(2), y=Y + 5)


def test_what_a_user_s_own_code_raises_keeps_its_traceback(monkeypatch):
    def raising(*_, **__):
        raise ValueError("my own mistake")

    monkeypatch.setattr("tfdist.keras_internals.build", raising)
    with pytest.raises(ValueError, match="my own mistake") as raised:
        fit(keras.layers.Dense(2))
    assert not isinstance(raised.value, InputError)
