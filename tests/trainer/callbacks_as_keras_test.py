"""A `Trainer` calls callbacks with the logs of Keras's own `fit`, and its history has what they add."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import InputError

RANDOM = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("float64")
X, Y = RANDOM.standard_normal((40, 4)), RANDOM.standard_normal((40, 1))
FIT = {"x": X, "y": Y, "batch_size": 10, "epochs": 2, "shuffle": False, "validation_data": (X, Y), "verbose": 0}
COMPILED = {"optimizer": "sgd", "loss": "mse", "metrics": ["mae"]}


def build():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def by_keras(callbacks, make=build, **given):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(**COMPILED)
    return model.fit(**FIT | given, callbacks=callbacks)


def trainer_of(strategy, make=build):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        return tfdist.Trainer(make(), **COMPILED)


def by_trainer(strategy, callbacks, make=build):
    return trainer_of(strategy, make).fit(**FIT, callbacks=callbacks)


class AddsToLogs(keras.callbacks.Callback):
    """Adds a number and a text to the logs of an epoch, and corrects a result."""

    def on_epoch_end(self, epoch, logs=None):
        logs |= {"half": epoch / 2, "note": f"epoch {epoch}", "mae": -1.0}


class HalvesTheRate(keras.callbacks.Callback):
    """Halves the learning rate, which it reads as programs do."""

    def on_epoch_end(self, epoch, logs=None):
        logs |= {"rate": float(self.model.optimizer.learning_rate), "updates": int(self.model.optimizer.iterations)}
        self.model.optimizer.learning_rate = logs["rate"] / 2


ADD = {
    "own": AddsToLogs,
    "HalvesTheRate": HalvesTheRate,
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=10),
}


@pytest.mark.parametrize("name", ["single", "mirrored2"])
@pytest.mark.parametrize("adds", ADD)
def test_the_history_has_what_callbacks_add_to_the_logs(name, adds, request):
    expected = by_keras([ADD[adds]()])
    found = by_trainer(request.getfixturevalue(name), [ADD[adds]()])
    assert list(found.history) == list(expected.history)
    for key, values in expected.history.items():
        assert found.history[key] == (values if key == "note" else pytest.approx(values)), key
    assert "0.5" in repr(found) or adds != "own"


class Seen(keras.layers.Layer):
    """Measures what it gets."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.size = keras.metrics.Mean(name="size")

    def call(self, inputs):
        self.size.update_state(keras.ops.abs(inputs))
        return inputs


class Measuring(keras.Model):
    """A model with metrics of its own: one that its calls update, one that nothing updates, and one of a layer."""

    def __init__(self):
        super().__init__()
        self.dense, self.seen = keras.layers.Dense(1), Seen(name="seen")
        self.output_mean, self.unused = keras.metrics.Mean(name="output"), keras.metrics.Mean(name="unused")

    def call(self, inputs):
        outputs = self.seen(self.dense(inputs))
        self.output_mean.update_state(outputs)
        return outputs


@pytest.mark.parametrize("name", ["single", "mirrored2"])
def test_the_metrics_of_a_model_have_keras_s_names_and_those_of_layers_the_layer_s_before(name, request):
    expected = by_keras([], Measuring).history
    found = by_trainer(request.getfixturevalue(name), [], Measuring).history
    assert set(found) == {key.replace("size", "seen_size") for key in expected}
    for key, values in expected.items():
        assert found[key.replace("size", "seen_size")] == pytest.approx(values), key


@pytest.mark.parametrize("names", [("output", "output"), ("mae", "other")])
def test_metrics_of_one_name_are_refused(single, names):
    def make():
        model = build()
        model.one, model.other = (keras.metrics.Mean(name=name) for name in names)
        return model

    with pytest.raises(InputError, match=f"must have unique names. Received twice: {names[0]}. Rename"):
        by_trainer(single, [], make)


class Events(keras.callbacks.Callback):
    """Records the calls for evaluations, epochs and the end of training, with their logs."""

    def __init__(self):
        super().__init__()
        self.seen = []
        for name in ("test_begin", "test_batch_begin", "test_batch_end", "test_end", "epoch_end", "train_end"):
            setattr(self, f"on_{name}", functools.partial(self._keep, name))

    def _keep(self, name, *number, logs=None):
        *number, logs = number if logs is None else (*number, logs)
        self.seen.append((name, *number, {key: round(value, 12) for key, value in logs.items()}))


@pytest.mark.parametrize("name", ["single", "mirrored2"])
def test_callbacks_are_told_of_evaluations(name, request):
    theirs, ours, later, given = Events(), Events(), Events(), {"x": X, "y": Y, "batch_size": 40, "verbose": 0}
    model = by_keras([theirs], validation_batch_size=40).model
    trainer = trainer_of(request.getfixturevalue(name))
    trainer.fit(**FIT, validation_batch_size=40, callbacks=[ours])
    assert [event[0] for event in ours.seen[:5]] == [event[0] for event in theirs.seen[:5]]
    assert ours.seen == theirs.seen
    theirs.seen.clear()
    model.evaluate(**given, callbacks=[theirs])
    trainer.evaluate(**given, callbacks=later)
    assert later.seen == theirs.seen and later.params["steps"] == 1
    later.seen.clear()
    trainer.evaluate(X, Y, 10, callbacks=[later])
    assert [event[:2] for event in later.seen[1:3]] == [("test_batch_begin", 0), ("test_batch_end", 3)], "one call"


def test_tensorboard_writes_the_results_of_evaluations(single, tmp_path):
    trainer = trainer_of(single)
    board = keras.callbacks.TensorBoard(tmp_path, update_freq=1)
    trainer.fit(**FIT, callbacks=[board])
    [written] = (tmp_path / "validation").iterdir()
    tags = {value.tag for event in tf.compat.v1.train.summary_iterator(str(written)) for value in event.summary.value}
    assert {"epoch_loss", "evaluation_loss_vs_iterations", "evaluation_mae_vs_iterations"} <= tags
