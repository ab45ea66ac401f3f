"""What is refused of a model whose stages would differ from one device, here in a pipeline of one process."""

import keras
import numpy as np
import pytest

import tfdist
from tests.keras_fit.models import Damped
from tfdist.errors import InputError

X, Y = np.ones([8, 3], "float32"), np.zeros([8], "int32")


class Counts(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.metrics.Mean()

    def call(self, x):
        self.mean.update_state(keras.ops.mean(x))
        return x


def dense(**options) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, **options)])


def twice() -> keras.Model:
    def block(name: str) -> keras.Model:
        inputs = keras.Input((3,))
        return keras.Model(inputs, keras.layers.Dense(3, name="same")(inputs), name=name)

    inputs = keras.Input((3,))
    return keras.Model(inputs, block("b")(block("a")(inputs)))


def trainer(model, micro_batches: int = 1, loss="sparse_categorical_crossentropy", **options) -> tfdist.Trainer:
    strategy = tfdist.load_strategy("pipeline", micro_batches=micro_batches, environment={})
    with strategy.scope():
        return tfdist.Trainer(model(), **{"optimizer": "sgd", "loss": loss, **options})


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (twice, {}, "Received twice: same/bias"),
        (lambda: keras.Sequential([keras.Input((3,)), Counts(), keras.layers.Dense(2)]), {}, "must not have metrics"),
        (dense, {"optimizer": keras.optimizers.SGD(global_clipnorm=1.0)}, "Pass clip=Clip(norm=1.0)"),
        (
            dense,
            {"optimizer": Damped()},
            "Received: Damped, which overrides apply. Override update_step instead, which",
        ),
        (dense, {"loss": keras.losses.Dice(axis=None), "micro_batches": 2}, "a loss must be a mean over rows"),
    ],
)
def test_refused(model, options, message):
    with pytest.raises(InputError) as error:
        trainer(model, **options).fit(X, Y, batch_size=8, steps=1, verbose=0)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_callbacks_that_hold_weights_are_refused():
    callback = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    with pytest.raises(InputError, match="trainer.load_best"):
        trainer(dense).fit(X, Y, batch_size=8, steps=1, verbose=0, callbacks=[callback])


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "predict_on_batch", "save", "__call__"])
def test_keras_methods_of_the_trainers_model_are_refused(method):
    """They would compute with zeros for the weights of other stages."""
    model = trainer(dense).model
    with pytest.raises(InputError) as error:
        getattr(model, method)(X)
    name = "" if method == "__call__" else f" to {method}"
    assert f"Received: a call{name} of the trainer's model. Use the trainer's fit, predict" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_new_trainer_trains_a_layer_that_was_frozen():
    strategy = tfdist.load_strategy("pipeline", environment={})
    weights = []
    with strategy.scope():
        first = keras.layers.Dense(4)
        model = keras.Sequential([keras.Input((3,)), first, keras.layers.Dense(2)])
    for trainable in (False, True):
        first.trainable = trainable
        with strategy.scope():
            trainer = tfdist.Trainer(model, optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(True))
        weights.append(np.array(first.kernel))
        trainer.fit(X, Y, batch_size=8, steps=2, verbose=0)
    weights.append(np.array(first.kernel))
    assert (weights[0] == weights[1]).all() and (weights[1] != weights[2]).any()


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_keras_fit_without_a_trainer_is_refused(schedule):
    strategy = tfdist.load_strategy("pipeline", pipeline_schedule=schedule, environment={})
    with strategy.scope():
        model = dense()
        model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(InputError, match=r"^A model .*, and .*kernel, .* call the trainer's fit\.$") as error:
        model.fit(X, Y, verbose=0)
    assert "\n" not in str(error.value)
