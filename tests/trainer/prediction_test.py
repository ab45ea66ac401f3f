"""Predictions: the outputs of one device for all rows, in order, on every strategy and on each process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.array_batches import ArrayBatches
from tests.workers import prediction, running
from tfdist.errors import InputError

X, Y = prediction.data()
X32 = X.astype("float32")


@pytest.fixture
def checkpoints(single, float64, tmp_path):
    """A checkpoint of a model trained on one device."""
    trainer = prediction.make_trainer(single)
    saved = tfdist.Checkpoints(directory=str(tmp_path / "checkpoints"), every="3")
    trainer.fit((X, {"logits": Y}), batch_size=8, steps=3, checkpoints=saved)
    return tmp_path / "checkpoints"


@pytest.fixture
def wanted(single, checkpoints):
    trainer = prediction.make_trainer(single)
    trainer.build((X, {"logits": Y}))
    trainer.resume(str(checkpoints))
    return [trainer.model.predict(X[:rows], batch_size=16, verbose=0) for rows, _ in prediction.SIZES]


def check(found, wanted):
    for ours, theirs, (rows, _) in zip(found, wanted, prediction.SIZES, strict=True):
        assert ours["logits"].shape == (rows, 4) and ours["scale"].shape == (rows, 2)
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("strategy", ["single", "mirrored2", "mirrored4", "mesh2x2"])
def test_strategies_of_one_process_predict_as_one_device(strategy, checkpoints, wanted, request):
    check(prediction.predictions(request.getfixturevalue(strategy), checkpoints), wanted)


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["multiworker", "horovod"])
def test_processes_predict_and_evaluate_as_one_device(strategy, single, checkpoints, wanted):
    """Also a model that gathers the rows of batches of which the last is short."""
    expected = prediction.evaluations(single)
    for found, evaluated in running.outcomes("prediction", strategy, 2, checkpoints, seconds=300):
        check(found, wanted)
        assert evaluated == [pytest.approx(results, rel=1e-12) for results in expected]


def make_trainer(strategy, model=None):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        return tfdist.Trainer(
            model() if model else keras.Sequential([keras.layers.Dense(2)]), optimizer="sgd", loss="mse"
        )


def test_a_model_that_was_neither_built_nor_trained(mirrored2):
    trainer = make_trainer(mirrored2)
    found = trainer.predict(X32, verbose=0)
    np.testing.assert_allclose(found, trainer.model(X32), rtol=1e-6)
    trainer.fit(X32, np.zeros([16, 2]), batch_size=8, steps=1)
    changed = trainer.predict(X32, batch_size=5, verbose=0)
    assert not np.allclose(changed, found)
    np.testing.assert_allclose(changed, trainer.model(X32), rtol=1e-6)


def test_forms_of_data(mirrored2):
    trainer = make_trainer(mirrored2)
    wanted = trainer.predict(X32, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices
    data = tfdist.data.DatasetSplits("own", *[tfdist.data.as_examples((X32, Y))] * 2, (6,), 3)
    for form in (dataset(X32), dataset((X32,)), dataset((X32, Y)), data.test, data):
        np.testing.assert_array_equal(trainer.predict(form, verbose=0), wanted)
    for form in (X32, dataset(X32), dataset(X32).repeat()):
        np.testing.assert_array_equal(trainer.predict(form, batch_size=3, verbose=0, steps=2), wanted[:6])


def test_data_that_comes_in_batches(mirrored2):
    trainer = make_trainer(mirrored2)
    wanted = trainer.predict(X32, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices
    for form in (dataset(X32).batch(5), dataset((X32, Y)).batch(5), ArrayBatches((X32, Y), 5), ArrayBatches(X32, 5)):
        np.testing.assert_array_equal(trainer.predict(form, verbose=0), wanted)
        np.testing.assert_array_equal(trainer.predict(form, verbose=0, steps=2), wanted[:10])
    forever = dataset(X32[:5]).batch(5).repeat()
    np.testing.assert_array_equal(trainer.predict(forever, verbose=0, steps=2), np.concatenate([wanted[:5]] * 2))


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_several_inputs(kind, mirrored2):
    def model():
        inputs = {name: keras.Input((3,), name=name) for name in "ab"}
        output = keras.layers.Dense(2)(keras.layers.Concatenate()(list(inputs.values())))
        return keras.Model(inputs if kind is dict else list(inputs.values()), output)

    parts = {"a": X32[:, :3], "b": X32[:, 3:]}
    trainer = make_trainer(mirrored2, model)
    found = trainer.predict(parts if kind is dict else kind(parts.values()), batch_size=5, verbose=0)
    np.testing.assert_allclose(found, trainer.model(parts if kind is dict else list(parts.values())), rtol=1e-6)


def test_a_strategy_that_compiles_replicas_repeats_the_last_row_and_drops_it(mirrored2, monkeypatch):
    monkeypatch.setattr(mirrored2, "compiles_replicas", True)  # as on a TPU
    trainer = make_trainer(mirrored2)
    found = trainer.predict(X32[:7], batch_size=3, verbose=0)
    np.testing.assert_allclose(found, trainer.model(X32[:7]), rtol=1e-6)
    with pytest.raises(InputError, match="of a stream must be divisible .* 7 examples and 2 replicas"):
        trainer.predict(tf.data.Dataset.from_tensor_slices(X32[:7]), verbose=0)


def test_what_is_shown(mirrored2, capsys):
    trainer = make_trainer(mirrored2)
    trainer.predict(X32, batch_size=4, verbose=0)
    assert capsys.readouterr().out == ""
    trainer.predict(X32, batch_size=4)
    assert "4/4" in capsys.readouterr().out


def test_an_output_without_rows(mirrored2):
    trainer = make_trainer(mirrored2, lambda: keras.Sequential([keras.layers.Lambda(tf.reduce_mean)]))
    with pytest.raises(InputError, match="a dense tensor whose first axis is the batch axis. Received: a scalar."):
        trainer.predict(X32, verbose=0)


def test_data_without_an_end_of_which_that_is_unknown(single):
    def rows():
        while True:
            yield np.ones(4)

    endless = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([4], tf.float64)).batch(8)
    assert make_trainer(single).predict(endless, steps=2, verbose=0).shape == (16, 2)
