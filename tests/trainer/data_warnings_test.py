"""The check of some examples before training: what is said, and that nothing else changes.

What is refused is in tests/cli/wrong_uses.tsv.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import InputError, NotFiniteError

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((40, 4)).astype("float32")
Y = np.arange(40) % 3
HOT = np.eye(3, dtype="float32")[Y]
SPARSE = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
IGNORING = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)}
CATEGORICAL = {"loss": keras.losses.CategoricalCrossentropy(from_logits=True)}
BINARY = {"loss": "binary_crossentropy", "units": 1, "activation": "sigmoid"}
ROW_3_COLUMN_2 = np.where(np.arange(160).reshape(40, 4) == 14, np.float32(np.nan), X)
BYTES = RANDOM.integers(0, 256, (40, 8, 8, 1))


def fit(strategy, x=X, y=Y, *, loss, units=3, activation=None, layers=(), data=None, steps=1, **options):
    with strategy.scope():
        inputs = keras.Input(x.shape[1:])
        outputs = keras.layers.Dense(units, activation=activation)(
            keras.Sequential([*layers, keras.layers.Flatten()])(inputs)
        )
        trainer = tfdist.Trainer(keras.Model(inputs, outputs), optimizer="sgd", loss=loss)
    return trainer.fit(data or (x, y), batch_size=8, steps=steps, **options)


ACCEPTED = {
    "in range": SPARSE,
    "one-hot": {"y": HOT, **CATEGORICAL},
    "probabilities": {"y": Y[:, None] / 4, **BINARY},
    "ignored": {"y": np.where(Y == 1, -1, Y), **IGNORING},
    "a loss of the user's own": {"y": HOT * 7, "loss": lambda y, outputs: keras.ops.mean((y - outputs) ** 2, -1)},
    "softmax": {"loss": "sparse_categorical_crossentropy", "activation": "softmax"},
    "scaled": {"x": BYTES.astype("uint8"), "layers": (keras.layers.Rescaling(1 / 255),), **SPARSE},
}
SAID = {
    "NaN in x": ({"x": ROW_3_COLUMN_2, **SPARSE}, ("NaN in column 2 of x, in 1 of the 40 examples",)),
    "twice": ({"activation": "softmax", **SPARSE}, ("ends in softmax", "from_logits=True")),
    "never": ({"loss": "sparse_categorical_crossentropy"}, ("without an activation", "activation='softmax'")),
    "uint8": ({"x": BYTES.astype("uint8"), **SPARSE}, ("x has values from 0 to 255", "Rescaling(1 / 255)")),
    "floats": ({"x": BYTES.astype("float32"), **SPARSE}, ("x has values from 0 to 255",)),
}


@pytest.mark.parametrize("row", ACCEPTED)
def test_others_are_accepted_silently(row, single, warned_once):
    fit(single, **ACCEPTED[row])
    assert warned_once() == []


@pytest.mark.parametrize("row", SAID)
def test_what_is_suspicious_is_said_once(row, mirrored2, warned_once, recwarn):
    options, words = SAID[row]
    with contextlib.suppress(NotFiniteError):
        fit(mirrored2, **options)
    [text] = warned_once()
    assert all(word in text for word in words), text
    assert [str(warning.message) for warning in recwarn if "from_logits" in str(warning.message)] == []


def test_nan_labels_and_named_inputs(single, warned_once):
    with single.scope():
        inputs = {name: keras.Input((1,), name=name) for name in ("age", "size")}
        outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(list(inputs.values())))
        trainer = tfdist.Trainer(keras.Model(inputs, outputs), optimizer="sgd", loss="mse")
    bad = np.where(np.arange(40)[:, None] == 20, np.float32(np.inf), X[:, :1])
    with pytest.raises(NotFiniteError):
        trainer.fit({"age": bad, "size": X[:, :1]}, bad, batch_size=40, steps=1)
    assert ['inf in x["age"], in 1 of' in warned_once()[0], "labels y are NaN or inf" in warned_once()[1]] == [True] * 2


def test_evaluation_data_with_nan_is_named_once_and_the_run_ends_as_usual(single, warned_once):
    history = fit(single, **SPARSE, steps=20, validation_data=(ROW_3_COLUMN_2, Y))
    [text] = warned_once()
    assert text.startswith("The evaluation data has NaN or inf in column 2 of x: ")
    assert [record["step"] for record in history.records if record["kind"] == "eval"] == [5, 10, 15, 20]


def test_an_evaluation_loss_that_is_not_finite_is_said_once(single, warned_once):
    """The values are too large, but finite."""
    fit(single, **SPARSE, steps=10, validation_data=(X * np.float32(1e38), Y))
    [text] = warned_once()
    assert text.startswith("The evaluation loss is nan") or text.startswith("The evaluation loss is inf")


@pytest.mark.parametrize("name", ["mirrored2", "mesh4x1", "pipeline"])
def test_evaluation_data_of_another_form_is_refused_before_training(name, request):
    """If the model does not accept it."""
    own = tfdist.load_strategy("pipeline", environment={}) if name == "pipeline" else request.getfixturevalue(name)
    for data, part in (((X[:, :3], Y), "x float32[3], y int64[]; ValueError: "), ((X, HOT), "[3]")):
        with pytest.raises(InputError, match="^Evaluation data: ") as error:
            fit(own, validation_data=data, **SPARSE)
        assert part in str(error.value) and "\n" not in str(error.value)


def test_an_evaluation_of_data_of_another_form_is_refused(single):
    with single.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        trainer = tfdist.Trainer(model, optimizer="sgd", **SPARSE)
    trainer.evaluate(X, Y)
    assert trainer.evaluate(X, Y.astype("int32")) == trainer.evaluate(X, Y)
    with pytest.raises(InputError, match=r"^Evaluation data: Model, loss .* x float32\[3\]") as error:
        trainer.evaluate(X[:, :3], Y)
    assert "\n" not in str(error.value)


def test_the_check_does_not_change_a_run(single, monkeypatch):
    """Neither the order of the data nor random layers."""

    def losses():
        keras.utils.set_random_seed(3)
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        dropout = (keras.layers.Dropout(0.5),)
        return [r["loss"] for r in fit(single, **SPARSE, layers=dropout, data=data, steps=4).records]

    checked = losses()
    monkeypatch.setattr("tfdist.trainer.fit_loop.check_examples", lambda *given: [])
    assert losses() == checked


def test_only_a_few_examples_of_a_stream_are_read(single):
    read = []

    def note(x, y):
        return x, tf.numpy_function(lambda label: read.append(1) or label, [y], tf.int64)

    data = tf.data.Dataset.from_tensor_slices((np.repeat(X, 50, 0), np.repeat(Y, 50))).map(note)
    data = data.map(lambda x, y: (x, tf.ensure_shape(y, [])))
    assert len(tfdist.data.as_examples(data).preview(64)[0]) == 64
    assert len(read) < 200
