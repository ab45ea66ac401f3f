"""Lists of inputs, outputs and weights are those of Keras, in each method and form of data."""

import keras
import numpy as np
import pytest

import tfdist
from tests.array_batches import ArrayBatches

RANDOM = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("float64")
X = [RANDOM.standard_normal((40, size)) for size in (3, 2)]
Y = [RANDOM.standard_normal((40, size)) for size in (1, 2)]
BATCHES = ArrayBatches((X, Y), 10)
WEIGHTS = [RANDOM.random(40), RANDOM.random(40)]


def build():
    keras.utils.set_random_seed(1)
    first, second = keras.Input((3,)), keras.Input((2,))
    both = keras.layers.Dense(4, "tanh")(keras.layers.Concatenate()([first, second]))
    return keras.Model(
        [first, second], [keras.layers.Dense(1, name="one")(both), keras.layers.Dense(2, name="two")(both)]
    )


def compiled():
    return {"optimizer": keras.optimizers.SGD(0.1), "loss": ["mse", "mae"], "loss_weights": [1.0, 0.5]}


def trainer_of(strategy):
    keras.utils.clear_session(free_memory=False)
    with strategy.scope():
        return tfdist.Trainer(build(), **compiled())


@pytest.mark.parametrize(
    "fit",
    [
        {"x": X, "y": Y},
        {"x": X, "y": Y, "sample_weight": WEIGHTS, "validation_data": (X, Y, WEIGHTS)},
        {"x": X, "y": Y, "validation_data": [X, Y, None], "validation_split": 0.0},
        {"x": X, "y": Y, "validation_split": 0.25},
    ],
    ids=["arrays", "weights", "validation", "split"],
)
def test_lists_are_those_of_keras(mirrored2, fit):
    arguments = fit | {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    keras.utils.clear_session(free_memory=False)
    plain = build()
    plain.compile(**compiled())
    wanted = plain.fit(**arguments).history
    found = trainer_of(mirrored2).fit(**arguments).history
    assert {name: pytest.approx(values, rel=1e-12) for name, values in wanted.items()} == found


def test_batches_evaluations_and_predictions_have_lists(single):
    trainer = trainer_of(single)
    wanted = trainer.evaluate(tuple(X), tuple(Y))
    trainer_evaluations = [trainer.evaluate(X, Y), trainer.evaluate((X, Y)), trainer.evaluate(BATCHES)]
    assert trainer_evaluations == [pytest.approx(wanted, rel=1e-12)] * 3
    assert [output.shape for output in trainer.predict(X, verbose=0)] == [(40, 1), (40, 2)]
    of_batches = trainer.fit(BATCHES, shuffle=False, verbose=0).history
    assert trainer_of(single).fit(BATCHES.repeated(), steps_per_epoch=4, verbose=0).history == of_batches


class Distance(keras.layers.Layer):
    def call(self, inputs):
        first, second = inputs
        self.add_loss(keras.ops.mean(keras.ops.square(first - second)))
        return first


@pytest.mark.parametrize("more", [{}, {"validation_split": 0.25}], ids=["all", "split"])
def test_a_list_without_targets_is_the_inputs(single, more):
    def of_distances():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        inputs = [keras.Input((3,)), keras.Input((2,))]
        return keras.Model(inputs, Distance()([keras.layers.Dense(4)(each) for each in inputs]))

    plain = of_distances()
    plain.compile(keras.optimizers.SGD(0.1))
    arguments = {"batch_size": 10, "shuffle": False, "verbose": 0, **more}
    wanted = plain.fit(X, **arguments).history
    with single.scope():
        trainer = tfdist.Trainer(of_distances(), optimizer=keras.optimizers.SGD(0.1), loss=None)
    assert trainer.fit(X, **arguments).history == {name: pytest.approx(v, rel=1e-12) for name, v in wanted.items()}
    assert trainer.evaluate(X)["loss"] == pytest.approx(plain.evaluate(X, batch_size=40, verbose=0), rel=1e-12)
