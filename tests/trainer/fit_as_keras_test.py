"""`Trainer.fit` takes the arguments of Keras's `fit` and gives its results, bit for bit where batches are equal."""

import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.adding_loss import AddsLoss
from tests.array_batches import ArrayBatches
from tests.step.user_metrics import OneVariable
from tfdist.errors import InputError, NotFiniteError

RANDOM = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("float64")
X, Y = RANDOM.standard_normal((70, 4)), RANDOM.standard_normal((70, 1))
BATCHES = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
ARRAY_BATCHES = ArrayBatches((X, Y), 10)


def build():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def compiled():
    return {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse", "metrics": ["mae"]}


def trainer_of(strategy):
    keras.utils.clear_session(free_memory=False)
    with strategy.scope():
        return tfdist.Trainer(build(), **compiled())


def close(history):
    return {name: pytest.approx(values, rel=1e-12, abs=0.0) for name, values in history.items()}


FITS = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 10, "shuffle": False},
    "default batch": lambda: {"x": X[:64], "y": Y[:64], "shuffle": False},
    "batches": lambda: {"x": BATCHES},
    "endless": lambda: {"x": BATCHES.repeat(), "steps_per_epoch": 5},
    "fewer steps": lambda: {"x": BATCHES.repeat(2), "steps_per_epoch": 4, "initial_epoch": 1},
    "PyDataset": lambda: {"x": ARRAY_BATCHES, "shuffle": False},
    "generator": lambda: {"x": ARRAY_BATCHES.repeated(), "steps_per_epoch": 7},
    "validation": lambda: {"x": BATCHES, "validation_data": BATCHES, "validation_steps": 2, "validation_freq": 2},
    "listed": lambda: {"x": BATCHES, "validation_data": (X, Y), "validation_batch_size": 9, "validation_freq": [1, 3]},
    "split": lambda: {"x": X, "y": Y, "validation_split": 0.2, "batch_size": 8, "shuffle": False},
    "weights": lambda: {"x": X, "y": Y, "sample_weight": np.arange(70.0) / 35, "batch_size": 10, "shuffle": False},
}


ON_BOTH = ("arrays", "batches", "validation")  # the others are given to one replica as to two


@pytest.mark.parametrize(
    ("name", "fit"),
    [
        *(("mirrored2", fit) for fit in FITS),
        *(pytest.param("single", fit, marks=[pytest.mark.full] * (fit not in ON_BOTH)) for fit in FITS),
    ],
)
def test_it_gives_what_keras_gives(fit, name, request):
    keras.utils.clear_session(free_memory=False)
    plain, seen, expected = build(), [], []
    plain.compile(**compiled())
    look = [keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: expected.append(epoch))]
    history = plain.fit(**FITS[fit]() | {"shuffle": False}, epochs=3, verbose=0, callbacks=look)
    trainer = trainer_of(request.getfixturevalue(name))
    look = [keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))]
    found = trainer.fit(**FITS[fit](), epochs=3, verbose=0, callbacks=look)
    assert found.epoch == history.epoch == seen == expected
    assert list(found.history) == list(history.history)
    assert found.history == close(history.history)
    for ours, theirs in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)


def test_rows_that_the_batch_does_not_divide_are_in_a_full_batch_with_those_of_the_next_epoch(single):
    """70 rows in batches of 32: epochs of 3, 2 and 2 steps, where Keras would make 3 each, the last of 6 rows."""
    steps = []
    count = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: steps.append(trainer.step))
    trainer = trainer_of(single)
    trainer.fit(X, Y, epochs=3, verbose=0, callbacks=[count])
    assert steps == [3, 5, 7]
    assert count.params["epochs"] == 3, "although the last batch reaches into the fourth"


def test_arrays_are_shuffled_by_the_seed_unless_that_is_switched_off(single):
    weights = []
    for shuffle in (True, True, False):
        trainer = trainer_of(single)
        trainer.fit(X, Y, 10, 1, 0, shuffle=shuffle)
        weights.append(trainer.model.get_weights()[0])
    assert (weights[0] == weights[1]).all() and (weights[0] != weights[2]).any()


def test_a_second_fit_counts_epochs_from_its_own_first(single):
    trainer = trainer_of(single)
    assert trainer.fit(X, Y, 10, 2, 0).epoch == [0, 1]
    assert trainer.fit(X, Y, 10, 2, 0).epoch == [0, 1]
    assert trainer.fit(X, Y, 10, 4, 0, initial_epoch=2).epoch == [2, 3]
    assert trainer.step == 42


def test_numbers_of_numpy_are_those_of_python(single):
    trainer, one, two = trainer_of(single), np.int64(1), np.int64(2)
    checked = {"validation_split": np.float32(0.5), "validation_freq": one, "validation_batch_size": two}
    found = trainer.fit(X[:8], Y[:8], two, np.int32(3), initial_epoch=one, steps_per_epoch=two, verbose=0, **checked)
    assert (found.epoch, trainer.step, len(found.history["val_loss"])) == ([1, 2], 4, 2)
    assert len(trainer.predict(X, batch_size=two, steps=two)) == 4
    trainer.evaluate(X, Y, batch_size=np.int64(9), steps=one)


def test_a_generator_that_ends_too_early(single):
    batches = ((X[:10], Y[:10]) for _ in range(8))
    with pytest.raises(InputError, match="ended in the steps after 70 examples.*steps_per_epoch"):
        trainer_of(single).fit(batches, steps_per_epoch=7, epochs=2, verbose=0)


@pytest.mark.parametrize(
    ("verbose", "steps"), [("auto", ["step 7/14", "step 10/14", "step 14/14", "step 14/14"]), (0, [])]
)
def test_lines_for_what_is_no_terminal(single, capsys, verbose, steps):
    """What is trained is described once, however often a program calls `fit`."""
    trainer = trainer_of(single)
    trainer.fit(X, Y, 10, 2, verbose, validation_data=(X, Y))
    written = capsys.readouterr()
    starts = [line.partition("  ")[0] for line in written.err.splitlines()]
    told = ["model", "data", "strategy", "batch", "length"]
    compiled = [line for line in starts if line.startswith("compiling the training step took ")]
    assert starts == ([*told, *compiled, *steps] if verbose else [])
    assert len(compiled) == bool(verbose) and not written.out
    trainer.fit(X, Y, 10, 1, verbose)
    assert [line.partition("  train")[0] for line in capsys.readouterr().err.splitlines()] == (
        ["step 20/21  epoch 1/1", "step 21/21  epoch 1/1"] if verbose else []
    )


def test_what_is_trained_is_described(single, capsys):
    trainer_of(single).fit(X, Y, 10, 2, validation_data=(X[:30], Y[:30]))
    assert capsys.readouterr().err.splitlines()[:5] == [
        "model     sequential, 49 parameters (392 bytes)",
        "data      70 examples of 4; 30 to evaluate",
        "strategy  single, 1 replica on 1 CPU device",
        "batch     10 examples, computed in float64",
        "length    14 steps, 2 epochs",
    ]


def test_a_run_that_fails_says_so_once(single, capsys):
    with pytest.raises(NotFiniteError):
        trainer_of(single).fit(X * np.nan, Y, verbose=2)
    assert capsys.readouterr().err.count("run ended: ") == 1


@pytest.mark.parametrize("data", [X, tf.data.Dataset.from_tensor_slices(X).batch(32)], ids=["array", "batches"])
def test_inputs_alone_train_a_model_whose_layers_add_the_loss(mirrored2, data):
    def make():
        return keras.Sequential([*build().layers, AddsLoss()])

    plain = make()
    plain.compile("sgd")
    expected = plain.fit(X[:64], batch_size=32, shuffle=False, verbose=0).history["loss"]
    keras.utils.clear_session(free_memory=False)
    with mirrored2.scope():
        trainer = tfdist.Trainer(make(), optimizer="sgd")
    found = trainer.fit(data, steps_per_epoch=2, shuffle=False, verbose=0).history["loss"]
    assert found == pytest.approx(expected, rel=1e-12)
    assert trainer.evaluate(data)["loss"] > 0


class Own(keras.Model):
    """A subclassed model, whose outputs are not known before it is called."""

    def __init__(self):
        super().__init__()
        self.dense, self.penalty = keras.layers.Dense(1), AddsLoss()

    def call(self, inputs):
        return self.penalty(self.dense(inputs))


def test_inputs_alone_train_a_subclassed_model(single):
    with single.scope():
        trainer = tfdist.Trainer(Own(), optimizer="sgd")
    first, last = trainer.fit(X, epochs=2, verbose=0).history["loss"]
    assert first > last > 0
    assert trainer.evaluate(X.astype("float16"))["loss"] == pytest.approx(trainer.evaluate(X)["loss"], rel=0.01)


class Signs(OneVariable):
    """Returns a dict, whose names Keras logs."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(keras.ops.sum(keras.ops.cast(y_true > 0, self.dtype)))

    def result(self):
        return {"above": self.value, "twice": 2 * self.value}


def test_a_metric_may_return_a_dict(mirrored2):
    with mirrored2.scope():
        trainer = tfdist.Trainer(build(), optimizer="sgd", loss="mse", metrics=[Signs()])
    expected = float((Y[:64] > 0).sum())
    history = trainer.fit(X[:64], Y[:64], verbose=0).history
    assert (history["above"], history["twice"]) == ([expected], [2 * expected])
    found = trainer.evaluate(X[:64], Y[:64], verbose=0)
    assert (found["above"], found["twice"]) == (expected, 2 * expected)


def test_evaluate_takes_data_in_the_same_forms(single):
    trainer = trainer_of(single)
    whole = trainer.evaluate(X, Y)
    for data in ((X, Y), BATCHES, ARRAY_BATCHES):
        assert trainer.evaluate(data) == pytest.approx(whole, rel=1e-12)
    assert trainer.evaluate(BATCHES.repeat(), steps=7) == pytest.approx(whole, rel=1e-12)
    assert trainer.evaluate(X, Y, 10, steps=2) == pytest.approx(trainer.evaluate(X[:20], Y[:20]), rel=1e-12)
    weighted = trainer.evaluate(X, Y, sample_weight=np.r_[np.ones(20), np.zeros(50)])
    assert weighted["loss"] != pytest.approx(whole["loss"])


def test_evaluate_takes_the_arguments_of_keras(single, capsys, monkeypatch):
    trainer = trainer_of(single)
    quiet = trainer.evaluate(X, Y, 10, 0, np.ones(70), 7, return_dict=True)
    assert capsys.readouterr().out == ""
    assert trainer.evaluate(X, Y, batch_size=10, verbose=2) == pytest.approx(quiet, rel=1e-12)
    shown = capsys.readouterr().out
    started = []
    monkeypatch.setattr(keras.utils, "Progbar", lambda *_, **__: started.append("clock") or unittest.mock.Mock())
    monkeypatch.setattr(
        trainer, "build", lambda data: started.append("evaluation") or tfdist.Trainer.build(trainer, data)
    )
    trainer.evaluate(X, Y, verbose=2)
    assert started == ["clock", "evaluation"]
    assert shown.startswith("7/7 - ") and f"loss: {quiet['loss']:.4f} - mae: {quiet['mae']:.4f}" in shown


def test_what_they_are_is_seen(single, mirrored2):
    trainer = trainer_of(mirrored2)
    assert repr(trainer) == "<Trainer of 'sequential' on <Mirrored: 2 replicas>, step 0>"
    assert repr(single) == "<Single: 1 replica>"
    history = trainer.fit(X, Y, 10, 1, 0)
    assert repr(history).startswith("<History of epochs 0 to 0, loss ")


def test_each_output_has_its_loss_and_metrics(single, mirrored2):
    targets = {"a": Y, "b": RANDOM.integers(0, 3, 70)}

    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        outputs = {"a": keras.layers.Dense(1, name="a")(inputs), "b": keras.layers.Dense(3, name="b")(inputs)}
        return keras.Model(inputs, outputs)

    def options():
        losses = {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        metrics = {"a": ["mae"], "b": ["accuracy"]}
        return {"optimizer": "sgd", "loss": losses, "loss_weights": {"a": 1.0, "b": 0.3}, "metrics": metrics}

    fit = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (X, targets)}
    plain = make()
    plain.compile(**options())
    expected = plain.fit(X, targets, **fit).history
    for strategy in (single, mirrored2):
        keras.utils.clear_session(free_memory=False)
        with strategy.scope():
            trainer = tfdist.Trainer(make(), **options())
        found = trainer.fit(X, targets, **fit).history
        assert found == close(expected) and {*found} >= {"a_loss", "b_accuracy", "val_b_loss"}


def test_a_generator_goes_on_where_the_last_fit_ended(single):
    """Nothing is skipped, neither of the same generator nor of a new one."""
    plain = build()
    plain.compile(**compiled())
    plain.fit(BATCHES, epochs=3, verbose=0, shuffle=False)
    trainer, batches = trainer_of(single), ARRAY_BATCHES.repeated()
    trainer.fit(batches, steps_per_epoch=7, verbose=0)
    trainer.fit(ARRAY_BATCHES.repeated(), steps_per_epoch=7, verbose=0)
    finite = ((X[first : first + 10], Y[first : first + 10]) for first in range(0, 70, 10))
    trainer.fit(finite, steps_per_epoch=7, verbose=0)
    for ours, theirs in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)


def test_validation_steps_that_reach_into_a_short_batch(single):
    trainer, of_32 = trainer_of(single), tf.data.Dataset.from_tensor_slices((X, Y)).batch(32)
    found = [
        trainer.fit(X, Y, 70, verbose=0, validation_data=data, validation_steps=3).history["val_loss"][0]
        - trainer.evaluate(X, Y)["loss"]
        for data in (of_32, (X, Y), (batch for batch in of_32.as_numpy_iterator()))
    ]
    np.testing.assert_allclose(found, 0.0, atol=1e-12)


def test_data_of_another_size_begins_with_an_epoch_of_its_own(single):
    trainer = trainer_of(single)
    trainer.fit(X, Y, 10, 1, 0)
    assert trainer.fit(X[:64], Y[:64], 10, 1, 0, validation_data=(X, Y)).epoch == [0]
    assert trainer.step == 7 + 7


class Shuffling(ArrayBatches):
    """Shuffles its batches at the end of each epoch."""

    def __init__(self):
        super().__init__((X, Y), 10)
        self.order = np.arange(7)
        self.random = np.random.default_rng(0)

    def __getitem__(self, index):
        return super().__getitem__(int(self.order[index]))

    def on_epoch_end(self):
        self.random.shuffle(self.order)


def test_a_py_dataset_that_shuffles_by_itself_resumes_exactly(single, tmp_path):
    whole, stopped, resumed = (trainer_of(single) for _ in range(3))
    whole.fit(Shuffling(), epochs=4, verbose=0)
    saved = tfdist.Checkpoints(directory=str(tmp_path), every="7")
    stopped.fit(Shuffling(), epochs=2, verbose=0, checkpoints=saved)
    resumed.build(Shuffling())
    assert resumed.resume(tmp_path) == 14
    resumed.fit(Shuffling(), epochs=4, verbose=0)
    for ours, theirs in zip(resumed.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}], ids=["at once", "micro-steps"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_losses_that_are_not_means_are_logged_as_by_keras(reduction, options, mirrored2):
    """Of a loss without reduction, the sum is differentiated and the mean is logged; a sum is logged per batch."""

    def compiled():
        return {"optimizer": keras.optimizers.SGD(0.01), "loss": keras.losses.MeanSquaredError(reduction=reduction)}

    weights = np.random.default_rng(1).uniform(size=70)
    fit = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0, "sample_weight": weights}
    fit["validation_data"] = X[:33], Y[:33]
    plain = build()
    plain.compile(**compiled())
    expected = plain.fit(X, Y, **fit).history
    keras.utils.clear_session(free_memory=False)
    with mirrored2.scope():
        trainer = tfdist.Trainer(build(), **compiled(), **options)
    found = trainer.fit(X, Y, **fit).history
    assert found == close(expected)
    for ours, theirs in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)
    evaluated = plain.evaluate(X, Y, 16, 0, return_dict=True)
    assert trainer.evaluate(X, Y, 16) == pytest.approx(evaluated, rel=1e-12)
