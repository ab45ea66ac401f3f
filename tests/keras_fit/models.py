"""Various models with their data, as built and fitted by programs; each is a function that returns a `Program`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.adding_loss import AddsLoss, mean_square
from tests.step.user_metrics import OneVariable

EXAMPLES = 44  # of which 33 are trained with; with batches of 8 the last one has 1


class Program(NamedTuple):
    """A compiled model and its data."""

    model: keras.Model
    x: Any
    y: Any
    sample_weight: Any = None
    class_weight: dict[int, float] | None = None


def _random() -> np.random.Generator:
    return np.random.default_rng(3)


def _features(width: int = 6) -> np.ndarray:
    return _random().normal(size=(EXAMPLES, width))


def _labels(classes: int = 4) -> np.ndarray:
    return _random().integers(0, classes, EXAMPLES)


class Damps:
    """Computes with the gradients of all variables in an `apply` of its own."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        norm = keras.ops.sqrt(sum(keras.ops.sum(keras.ops.square(gradient)) for gradient in grads))
        super().apply([g / (1 + norm) if len(g.shape) > 1 else g for g in grads], trainable_variables)


class Damped(Damps, keras.optimizers.SGD):
    pass


def functional() -> Program:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="relu", kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(4, activation="softmax")(hidden))
    model.compile(Damped(0.2, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return Program(model, _features(), _labels(), class_weight={0: 0.5, 2: 3.0})


class Net(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.hidden(x))


def subclassed() -> Program:
    model = Net()
    model.compile("adamw", keras.losses.Huber(), metrics=["mae"], weighted_metrics=["mse"])
    return Program(model, _features(), _random().normal(size=(EXAMPLES, 1)), _random().uniform(size=EXAMPLES))


def several_inputs_and_outputs() -> Program:
    a, b = keras.Input((6,), name="a"), keras.Input((3,), name="b")
    hidden = keras.layers.Concatenate()([keras.layers.Dense(5)(a), keras.layers.Dense(4)(b)])
    outputs = {name: keras.layers.Dense(units, name=name)(hidden) for name, units in (("kind", 4), ("size", 1))}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        keras.optimizers.RMSprop(0.01),
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        loss_weights={"kind": 0.3, "size": 2.0},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    x = {"a": _features(6), "b": _features(3)}
    return Program(model, x, {"kind": _labels(), "size": _random().normal(size=(EXAMPLES, 1))})


def shared_layers() -> Program:
    tower = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)])
    a, b = keras.Input((6,)), keras.Input((6,))
    difference = keras.layers.Subtract()([tower(a), tower(b)])
    model = keras.Model([a, b], keras.layers.Dense(1, activation="sigmoid")(difference))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy", "AUC"])
    return Program(model, [_features(), _features()[::-1].copy()], _labels(2)[:, None])


def recurrent() -> Program:
    """Masked time steps, whose number differs between rows, do not count in the loss."""
    layers = [keras.layers.Embedding(11, 4, mask_zero=True), keras.layers.LSTM(6, return_sequences=True)]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.2), loss, metrics=["accuracy"])
    lengths = _random().integers(1, 6, (EXAMPLES, 1))
    tokens = _random().integers(1, 11, (EXAMPLES, 5)) * (np.arange(5) < lengths)
    return Program(model, tokens.astype("int32"), _random().integers(0, 3, (EXAMPLES, 5)))


def with_add_loss() -> Program:
    inputs = keras.Input((6,))
    hidden = AddsLoss(lambda x: 0.1 * mean_square(x))(keras.layers.Dense(5, activity_regularizer="l2")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, bias_regularizer="l1")(hidden))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return Program(model, _features(), _random().normal(size=(EXAMPLES, 1)))


class LargeErrors(OneVariable):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        large = keras.ops.abs(keras.ops.cast(y_true, y_pred.dtype) - y_pred) > 1
        self.value.assign_add(keras.ops.sum(keras.ops.cast(large, self.dtype)))


def squared(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(keras.ops.cast(y_true, y_pred.dtype) - y_pred), axis=-1)


def custom_metrics() -> Program:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[LargeErrors(), squared])
    return Program(model, _features(), _random().normal(size=(EXAMPLES, 1)))


class Reflected(keras.layers.Layer):
    """Fails without rows."""

    def call(self, x: Any) -> Any:
        return tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")


def convolutional() -> Program:
    hidden = [keras.layers.Conv2D(3, 3), tfdist.layers.SyncBatchNormalization(), keras.layers.MaxPooling2D()]
    layers = [Reflected(), *hidden, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6, 5, 1)), *layers])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=[LargeErrors()])
    return Program(model, _random().normal(size=(EXAMPLES, 6, 5, 1)), _random().normal(size=(EXAMPLES, 1)))


def frozen_layers() -> Program:
    layers = [keras.layers.Dense(6, activation="relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(4)])
    model.layers[0].trainable = model.layers[1].trainable = False
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01), loss, metrics=["accuracy"])
    return Program(model, _features(), _labels())


def sparse_gradients() -> Program:
    """The table is large enough for its gradient to be sent as rows."""
    layers = [keras.layers.Embedding(3000, 8), keras.layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers, keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    return Program(model, _random().integers(0, 3000, (EXAMPLES, 5)).astype("int32"), _labels())


class OwnStep(keras.Model):
    """A custom train step with custom metrics, as in Keras's guide."""

    def __init__(self, inputs: Any, outputs: Any) -> None:
        super().__init__(inputs, outputs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, y_pred))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        self.mae.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae.result(), "last": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(keras.losses.mean_squared_error(y, y_pred))
        self.mae.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae.result()}

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.loss_tracker, self.mae]


def custom_train_step() -> Program:
    inputs = keras.Input((6,))
    model = OwnStep(inputs, keras.layers.Dense(1)(keras.layers.Dense(5, activation="tanh")(inputs)))
    model.compile(keras.optimizers.AdamW(0.01))
    return Program(model, _features(), _random().normal(size=(EXAMPLES, 1)))


class OwnLoss(keras.Model):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * keras.ops.mean(keras.ops.square(y_pred))


def custom_compute_loss() -> Program:
    inputs = keras.Input((6,))
    model = OwnLoss(inputs, keras.layers.Dense(4, kernel_regularizer="l2")(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, weighted_metrics=["accuracy"])
    return Program(model, _features(), _labels(), _random().uniform(size=EXAMPLES))


class Two(keras.Model):
    """Two optimizers, each for a part of the variables, applied in sequence: the second depends on the first one's update."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = keras.layers.Dense(3), keras.layers.Dense(6)
        self.encoder.build((None, 6))
        self.decoder.build((None, 3))
        self.built = True
        self.second = keras.optimizers.Adam(0.01)

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        found = {}
        for name, layer, optimizer in (("a", self.encoder, self.optimizer), ("b", self.decoder, self.second)):
            with tf.GradientTape() as tape:
                found[name] = keras.losses.MeanSquaredError()(x, self(x))
            optimizer.apply(tape.gradient(found[name], layer.trainable_variables), layer.trainable_variables)
        return found

    def test_step(self, data: Any) -> dict[str, Any]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"a": keras.ops.mean(keras.ops.square(x - self(x)))}


def two_optimizers() -> Program:
    model = Two()
    model.compile(Damped(0.2))
    return Program(model, _features(), None)


def error(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


class Size(keras.layers.Layer):
    """Reports the mean size of its inputs."""

    def __init__(self) -> None:
        super().__init__(name="sizes")
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        self.size.update_state(keras.ops.mean(keras.ops.abs(x)))
        return x


def scalar_metrics() -> Program:
    """Metric functions that return a number for the batch, and a layer with a mean of such numbers."""
    layers = [keras.layers.Dense(8, activation="tanh"), Size()]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[error, keras.metrics.MeanMetricWrapper(error, name="mean")])
    return Program(model, _features(), _random().normal(size=(EXAMPLES, 1)))


PROGRAMS: dict[str, Callable[[], Program]] = {
    make.__name__: make
    for make in (
        functional,
        subclassed,
        several_inputs_and_outputs,
        shared_layers,
        recurrent,
        with_add_loss,
        custom_metrics,
        frozen_layers,
        sparse_gradients,
        custom_train_step,
        custom_compute_loss,
        two_optimizers,
        scalar_metrics,
        convolutional,
    )
}


def run(program: Program, batch_size: int = 8) -> dict[str, Any]:
    """Fits, evaluates and predicts as a program does; returns all resulting numbers."""
    model, x, y = program.model, program.x, program.y
    given = {"sample_weight": program.sample_weight, "class_weight": program.class_weight}
    history = model.fit(x, y, batch_size=batch_size, epochs=2, verbose=0, validation_split=0.25, **given).history
    evaluated = model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True, sample_weight=program.sample_weight)
    first = [None if part is None else keras.tree.map_structure(lambda leaf: leaf[:9], part) for part in (x, y)]
    return {
        "history": history,
        "evaluated": evaluated,
        "predicted": model.predict(x, batch_size=7, verbose=0),
        "trained on a batch": model.train_on_batch(*first, return_dict=True),
        "trained on a smaller one": model.train_on_batch(
            *(None if part is None else keras.tree.map_structure(lambda leaf: leaf[:8], part) for part in first),
            return_dict=True,
        ),
        "tested on a batch": model.test_on_batch(*first, return_dict=True),
        "predicted on a batch": model.predict_on_batch(first[0]),
        "weights": model.get_weights(),
    }
