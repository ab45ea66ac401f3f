"""Common usage in which results could be silently wrong; on two replicas, compared with plain Keras in float64."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.keras_fit.comparing import Compare, both, differences
from tfdist import keras_fit
from tfdist.errors import InputError

X = np.random.default_rng(0).normal(size=(19, 5))  # with batches of 6, the last one has a single row
Y = np.random.default_rng(1).normal(size=(19, 1))


def dense(**compiled: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
    return model


def fitted(model: keras.Model) -> Any:
    history = model.fit(X, Y, batch_size=6, epochs=3, verbose=0, validation_data=(X, Y)).history
    return history, model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)


def test_arrays_are_divided_by_steps_without_a_batch_size(as_one_device: Compare) -> None:
    """Into batches of 2 rows here, which Keras computes from the number of steps."""

    def use(model: keras.Model) -> Any:
        more = {"validation_data": (X, Y), "validation_steps": 7}
        history = model.fit(X, Y, steps_per_epoch=10, epochs=2, shuffle=False, verbose=0, **more).history
        return history, model.evaluate(X, Y, steps=10, verbose=0), model.predict(X, steps=10, verbose=0)

    as_one_device(lambda: dense(steps_per_execution=5, metrics=["mae"]), use)


@pytest.mark.parametrize("layer", [keras.layers.Dense(2, trainable=False), keras.layers.Rescaling(2.0)])
def test_a_model_without_weights_to_train(layer: Any, as_one_device: Compare) -> None:
    def model() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), type(layer).from_config(layer.get_config())])
        model.compile("adam", "mse", metrics=["mae"])
        return model

    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        as_one_device(model, fitted)


def listed_outputs(loss: Any) -> keras.Model:
    inputs = keras.Input((5,))
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("zeta", "alpha")]
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def test_labels_by_the_names_of_listed_outputs(as_one_device: Compare) -> None:
    def use(model: keras.Model) -> Any:
        return model.fit(X, {"zeta": 9 * Y, "alpha": Y}, batch_size=6, verbose=0).history

    as_one_device(lambda: listed_outputs({"zeta": "mse", "alpha": "mae"}), use)


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_labels_for_the_outputs_that_have_a_loss(as_one_device: Compare) -> None:
    def use(model: keras.Model) -> Any:
        named = model.fit(X, [None, Y], batch_size=6, verbose=0).history
        return named, model.fit(X, Y, batch_size=6, verbose=0).history

    as_one_device(lambda: listed_outputs([None, "mae"]), use)


class OwnTracker(keras.Model):
    """The example in the documentation of `keras.Model.compute_loss`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = keras.ops.mean((y_pred - y) ** 2)
        self.loss_tracker.update_state(loss, sample_weight=keras.ops.shape(y)[0])
        return loss

    def reset_metrics(self) -> None:
        self.loss_tracker.reset_state()

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.loss_tracker]


class OwnNames(keras.Model):
    """Names the arguments of `compute_loss` in its own way, as Keras passes them by position."""

    def compute_loss(self, inputs: Any, targets: Any, predictions: Any, weights: Any = None) -> Any:
        return super().compute_loss(inputs, targets, predictions, weights) + keras.ops.mean(predictions**2)


class Renamed(keras.Model):
    """A metric whose result is returned under another name; fitted for more steps than there are between updates of logs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="total_loss")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.tracker]


def one_layer(kind: type[keras.Model], *layers: keras.Layer) -> keras.Model:
    inputs = outputs = keras.Input((5,))
    for layer in (*layers, keras.layers.Dense(1)):
        outputs = layer(outputs)
    model = kind(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.parametrize("kind", [OwnTracker, OwnNames])
def test_a_loss_with_names_or_with_a_metric_of_its_own(kind: type[keras.Model], as_one_device: Compare) -> None:
    as_one_device(lambda: one_layer(kind), fitted)


def test_a_metric_that_is_returned_under_another_name(as_one_device: Compare) -> None:
    def use(model: keras.Model) -> Any:
        return model.fit(X[:18].repeat(4, 0), Y[:18].repeat(4, 0), batch_size=6, epochs=3, verbose=0).history

    as_one_device(lambda: one_layer(Renamed), use)


def test_predictions_are_those_of_the_model_as_it_is(float64: None, mirrored2: tfdist.Strategy) -> None:
    def use(model: keras.Model) -> Any:
        before = model.predict(X, verbose=0)
        model.pop()
        with mirrored2.scope() if keras_fit.distribution_of(model) else tf.init_scope():
            model.add(keras.layers.Dense(2))
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, batch_size=6, verbose=0)
        return before, model.predict(X, verbose=0)

    assert not differences(*both(mirrored2, dense, use))


@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning")
def test_more_steps_than_there_is_data_for_leave_a_history(as_one_device: Compare) -> None:
    def use(model: keras.Model) -> Any:
        return model.fit(X, Y, batch_size=6, steps_per_epoch=6, verbose=0).history

    as_one_device(dense, use)


class Pair(keras.Model):
    """A model without `call` that creates its own labels, like models with two players."""

    def __init__(self) -> None:
        super().__init__()
        self.player = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = keras.losses.BinaryCrossentropy(from_logits=True)(tf.ones([tf.shape(x)[0], 1]), self.player(x))
        self.optimizer.apply(tape.gradient(loss, self.player.trainable_variables), self.player.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("loss", [None, "mse"])
def test_a_step_without_call_and_labels(loss: str | None, as_one_device: Compare) -> None:
    def make() -> keras.Model:
        model = Pair()
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    def use(model: keras.Model) -> Any:
        model.fit(X, batch_size=6, epochs=2, verbose=0)
        return model.player.get_weights()

    as_one_device(make, use)


def test_what_is_saved_of_a_scaled_loss_is_all_of_it(mirrored2: tfdist.Strategy, tmp_path: Any, precision: Any) -> None:
    keras.utils.set_random_seed(0)
    precision("mixed_float16")
    with mirrored2.scope():
        model = dense()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        model.set_weights([0.1 * weight for weight in model.get_weights()])
    tfdist.distribute(model, mirrored2).fit(X, 0.1 * Y, batch_size=6, verbose=0)  # so small that no step overflows
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    ours = model.optimizer
    assert isinstance(ours, keras.optimizers.LossScaleOptimizer)
    for name in ("iterations", "dynamic_scale"):
        assert float(getattr(loaded, name)) == float(tf.convert_to_tensor(getattr(ours, name)))
    assert int(loaded.inner_optimizer.iterations) == 4
    assert any(np.any(np.asarray(v)) for v in loaded.variables if "momentum" in v.path)


class Doubled(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs * 2


class ScaledStep(keras.Model):
    """As Keras's guides write a `train_step` for mixed precision."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"training_loss": loss, **self.compute_metrics(x, y, outputs)}


class OwnSGD(keras.optimizers.SGD):
    pass


def mean_distance(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def root_mean_square(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean((y_true - y_pred) ** 2))


@pytest.mark.parametrize(
    ("model", "layers", "compiled", "overflows"),
    [
        (keras.Model, [Doubled], {}, False),
        (keras.Model, [], {"loss": mean_distance, "metrics": [mean_distance]}, False),
        (keras.Model, [], {"loss": root_mean_square}, False),
        (ScaledStep, [], {"metrics": [mean_distance]}, True),
    ],
    ids=["layer", "loss and metric", "loss of all rows", "train step"],
)
def test_own_code_in_mixed_float16(
    model: Any, layers: Any, compiled: Any, overflows: bool, mirrored2: Any, monkeypatch: Any, precision: Any
) -> None:
    """If gradients of one of three batches overflow, its step is skipped, and the scale is halved."""
    monkeypatch.setattr("tests.keras_fit.comparing.TOLERANCE", 2e-3)
    labels = np.where(np.arange(len(X))[:, None] == 9, 1e6, Y) if overflows else Y

    def make() -> keras.Model:
        precision("mixed_float16")
        inputs = hidden = keras.Input((5,))
        for layer in (keras.layers.Dense(4, "tanh"), *[layer() for layer in layers]):
            hidden = layer(hidden)
        made = model(inputs, keras.layers.Dense(1, dtype="float32")(hidden))
        made.compile(keras.optimizers.LossScaleOptimizer(OwnSGD(0.01), 256.0), **{"loss": "mse"} | compiled)
        return made

    def use(made: keras.Model) -> Any:
        history = made.fit(X, labels, batch_size=8, epochs=4, shuffle=False, verbose=0).history
        return history, float(tf.convert_to_tensor(made.optimizer.dynamic_scale)), int(made.optimizer.iterations)

    ours, plain = both(mirrored2, make, use)
    assert not differences(ours, plain)
    assert plain[0][1:] == ((16.0, 8) if overflows else (256.0, 12))


def test_saving_a_model_in_a_model_distributes_nothing(single: tfdist.Strategy, tmp_path: Any) -> None:
    """Keras accesses every attribute of what it saves; with several processes, only the chief would communicate."""
    inner = dense()
    outer = keras.Sequential([keras.Input((5,)), inner])
    with keras_fit.attach_all(lambda model: pytest.fail("distributed by being looked at"), single):
        outer.save_weights(tmp_path / "outer.weights.h5")
    assert keras_fit.distribution_of(inner) is None


def test_batches_of_other_sizes_are_traced_without_a_word(mirrored2: tfdist.Strategy, monkeypatch: Any) -> None:
    """One process may have to retrace when another one does not: it must not wait for the others."""
    with mirrored2.scope():
        model = tfdist.distribute(dense(), mirrored2)
    model.train_on_batch(X[:8], Y[:8])
    model.test_on_batch(X[:8], Y[:8])
    monkeypatch.setattr("tfdist.step.step.agree_on_plan", lambda *_: pytest.fail("asked again"))
    monkeypatch.setattr("tfdist.keras_fit.training_steps.agree_on_plan", lambda *_: pytest.fail("asked again"))
    for rows in (7, 5, 1):
        model.train_on_batch(X[:rows], Y[:rows])
        model.test_on_batch(X[:rows], Y[:rows])


def test_what_is_refused(mirrored2: tfdist.Strategy) -> None:
    with mirrored2.scope():
        model = tfdist.distribute(dense(), mirrored2)
    model.predict_step = lambda data: tf.reduce_sum(model(data[0] if isinstance(data, tuple) else data))
    with pytest.raises(InputError, match="Received: a scalar"):
        model.predict(X, verbose=0)


def test_evaluating_without_an_optimizer(as_one_device: Compare) -> None:
    def make() -> keras.Model:
        model = dense()
        model.compile(optimizer=None, loss="mse")
        return model

    as_one_device(make, lambda model: model.evaluate(X, Y, batch_size=6, verbose=0))
