"""Losses of a user that are not means over rows, and outputs that depend on other rows."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.adding_loss import AddsLoss
from tests.step.row_dependence import dependence, names
from tests.step.user_metrics import mean, per_row, root, total, where_positive
from tfdist.errors import InputError

ops = keras.ops
X, Y = np.random.default_rng(0).normal(size=(2, 16, 4)).astype("float32")


class Sampling(keras.layers.Layer):
    """Draws around its inputs, and adds a mean of what it has drawn, and counts its calls."""

    def __init__(self) -> None:
        super().__init__(name="sampling")
        self.seed_generator = keras.random.SeedGenerator(1)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        x = x + keras.random.normal(ops.shape(x), seed=self.seed_generator)
        self.add_loss(ops.mean(ops.square(x)))
        return x


class OfClass(keras.Loss):
    """Returns a value for each row, which depends on all of them."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y_true - y_pred), axis=-1) * ops.max(y_pred)


def of_pairs(y_true: Any, y_pred: Any) -> Any:
    pairs = ops.reshape(y_pred, (8, 2, 4))  # as for a batch of 16 rows
    return ops.mean(ops.square(pairs[:, 0] - pairs[:, 1]))


class Counting(keras.layers.Layer):
    """Counts its calls in a metric and in a variable of TensorFlow, and knows the size of a batch."""

    def __init__(self) -> None:
        super().__init__(name="counting")
        self.sizes = keras.metrics.Mean(name="sizes")
        self.calls = tf.Variable(0, trainable=False)

    def call(self, x: Any) -> Any:
        assert x.shape[0] in (None, 16)
        self.sizes.update_state(ops.mean(x))
        self.calls.assign_add(1)
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


CASES: dict[str, tuple[Any, list[Callable[[], keras.layers.Layer]], list[str]]] = {
    "mean": (mean, [], []),
    "value for each row": (per_row, [], []),
    "of Keras": ("mse", [lambda: keras.layers.Dense(4, activity_regularizer="l2")], []),
    "sum": (total, [], ["total"]),
    "root": (root, [], ["root"]),
    "mean over a mask": (where_positive, [], ["where_positive"]),
    "class": (OfClass(), [], ["of_class"]),
    "function for one size": (of_pairs, [], ["of_pairs"]),
    "added mean": (mean, [AddsLoss], []),
    "added sum": (mean, [lambda: AddsLoss(lambda x: ops.sum(x**2), name="adding")], ["the loss added by adding"]),
    "added mean of draws": (mean, [Sampling], []),
    "added mean of a layer with a state": (per_row, [Counting], []),
    "added in a layer behind one that couples rows": (
        mean,
        [lambda: keras.layers.Lambda(lambda x: x - ops.max(x, axis=0)), AddsLoss],
        [],
    ),
}


def network(loss: Any, layers: list[Callable[[], keras.layers.Layer]]) -> keras.Model:
    inputs = x = keras.Input([4])
    for make in layers:
        x = make()(x)
    model = keras.Model(inputs, keras.layers.Dense(4)(x))
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_mean_is_found(case: str) -> None:
    loss, layers, expected = CASES[case]
    model = network(loss, layers)
    model.evaluate(X, Y, batch_size=16, verbose=0)  # builds the loss
    found = dependence(model, X, Y, micro_steps=2)
    assert (names(found.describe_coupled("loss")), bool(found.describe_coupled("output"))) == (
        expected,
        "couples" in case,
    )
    assert not (found.describe_coupled("variable") or found.metrics or found.error)


class Measuring(keras.layers.Layer):
    """Keeps the mean of a value of each batch."""

    def __init__(self, value: Callable[[Any], Any]):
        super().__init__(name="measuring")
        self.kept, self._value = keras.metrics.Mean(name="kept"), value

    def call(self, x: Any) -> Any:
        self.kept.update_state(self._value(x))
        return x


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (ops.mean, {}),
        (lambda x: x, {}),
        (lambda x: ops.sqrt(ops.mean(ops.square(x))), {"measuring_kept": "rows"}),
        (lambda x: ops.sqrt(ops.mean(ops.square(tfdist.gather_rows(x)))), {}),
        (ops.sum, {"measuring_kept": "rows"}),
    ],
    ids=["mean", "elements", "root", "root of gathered rows", "sum"],
)
def test_metrics_that_layers_update(value: Any, expected: dict[str, str], mirrored2: tfdist.Strategy) -> None:
    with mirrored2.scope():
        model = network("mse", [lambda: Measuring(value)])
    kept = model.layers[1].kept.variables
    mirrored2.run(lambda: [variable.assign(2.0) for variable in kept])
    assert dependence(model, X, Y, replicas=2).metrics == expected
    assert [float(copy) for variable in kept for copy in mirrored2.local(variable.value)] == [2.0] * 4


def test_losses_of_several_outputs_are_told_apart() -> None:
    inputs = keras.Input([4])
    model = keras.Model(inputs, {name: keras.layers.Dense(4, name=name)(inputs) for name in ("a", "b", "c")})
    model.compile("sgd", {"a": root, "b": mean, "c": root})
    targets = {"a": Y, "b": Y, "c": Y}
    model.evaluate(X, targets, verbose=0)
    assert names(dependence(model, X, targets, micro_steps=2).describe_coupled("loss")) == ["root", "root"]


class OfKnownRows(keras.Loss):
    """Takes a number of rows that is known when it is traced, once it is built."""

    is_built = False

    def call(self, y_true: Any, y_pred: Any) -> Any:
        if self.is_built and y_pred.shape[0] is None:
            raise ValueError("The number of rows is unknown")
        return per_row(y_true, y_pred)


def test_what_cannot_be_traced_for_any_number_of_rows_is_said() -> None:
    loss = OfKnownRows()
    model = network(loss, [])
    model.evaluate(X, Y, verbose=0)
    loss.is_built = True
    assert dependence(model, X, Y, replicas=2).error == "ValueError: The number of rows is unknown"


def fit(strategy: tfdist.Strategy, loss: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        trainer = tfdist.Trainer(network(loss, []), optimizer="sgd", loss=loss, **options)
    return trainer.fit(X, Y, batch_size=8, epochs=2, verbose=0).history


def test_a_trainer_partitions_it_and_refuses_it_where_replicas_train_locally(
    single: tfdist.Strategy, mirrored2: tfdist.Strategy
) -> None:
    fit(mirrored2, mean)
    assert fit(mirrored2, root) == {"loss": pytest.approx(fit(single, root)["loss"], rel=1e-5)}
    message = (
        r"Received: root, .* together, by Sqrt in tests/step/user_metrics.py:\d+; with 2 replicas and 1 micro-step"
    )
    with pytest.raises(InputError, match=message):
        fit(mirrored2, root, sync="local_sgd(period=2)")


def centered(x: Any) -> Any:
    return x - ops.mean(x, axis=0)


def test_outputs_must_be_of_their_rows_where_replicas_train_locally(mirrored2: tfdist.Strategy) -> None:
    with mirrored2.scope():
        inputs = keras.Input([4])
        model = keras.Model(inputs, keras.layers.Dense(4)(centered(inputs)))
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse", sync="local_sgd(period=2)")
    with pytest.raises(InputError, match="the output for a row.* 2 replicas"):
        trainer.fit(X, Y, batch_size=8, epochs=1, verbose=0)
