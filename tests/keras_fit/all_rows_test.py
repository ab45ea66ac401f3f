"""Detecting what needs all rows of a batch, without side effects; compared with plain Keras."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfdist
from tests.keras_fit.comparing import Compare, both, differences
from tests.keras_fit.rows import StartsFromABatch, Static, X, Y, fitted, functional, sequential
from tests.step.user_metrics import Peak

ops = keras.ops


class Standardized(keras.layers.Layer):
    """Gives 0 / 0 for a single row."""

    def call(self, x: Any) -> Any:
        return (x - ops.mean(x, axis=0)) / ops.std(x, axis=0)


def pairs(y: Any, x: Any) -> Any:
    return ops.mean((y - x) ** 2) + 0.1 * ops.mean(ops.matmul(x, ops.transpose(x)) ** 2)


def fitted_with_uneven_rows(model: keras.Model) -> Any:
    return model.fit(X, Y, batch_size=5, epochs=2, verbose=0).history, model.evaluate(X, Y, verbose=0)


def fitted_and_predicted(model: keras.Model) -> Any:
    return fitted(model), model.predict(X, batch_size=8, verbose=0)


def after_calls_with_one_row(model: keras.Model) -> Any:
    found = [model.predict(X[:1], verbose=0), model.train_on_batch(X[:1], Y[:1]), model.test_on_batch(X[:1], Y[:1])]
    return found, fitted_and_predicted(model), model.evaluate(X, Y, batch_size=8, verbose=0)


class CountsRows(keras.layers.Layer):
    """Scales its inputs by the number of rows that it has seen before."""

    def __init__(self, dtype_of_count: str, aggregation: str = "none"):
        super().__init__()
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype=dtype_of_count, aggregation=aggregation
        )

    def call(self, x: Any, training: bool = False) -> Any:
        outputs = x / (1.0 + 0.1 * ops.cast(self.count, x.dtype))
        if training:
            self.count.assign_add(ops.cast(ops.shape(x)[0], self.count.dtype))
        return outputs


def with_gradients_that_it_accumulates() -> keras.Model:
    """Returns a model whose step updates weights by hand in every second step, in which alone replicas would differ."""

    def train_step(self: Any, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - self(x, training=True)) ** 2)
        self.steps.assign_add(1)
        is_due = ops.cast(self.steps % 2 == 0, loss.dtype)
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient, variable in zip(self.totals, gradients, self.trainable_variables, strict=True):
            total.assign_add(gradient)
            variable.assign_sub(0.05 * is_due * total)
            total.assign((1 - is_due) * total)
        return {"loss": loss}

    model = functional(train_step)
    model.steps = model.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)
    shapes = [variable.shape for variable in model.trainable_variables]
    model.totals = [model.add_weight(shape=shape, initializer="zeros", trainable=False) for shape in shapes]
    return model


class SquaredError(keras.losses.Loss):
    """Has no reduction: Keras differentiates the sum, and records the mean."""

    def __init__(self) -> None:
        super().__init__(reduction=None)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return 0.1 * ops.sum((y_true - y_pred) ** 2, -1)


def penalized(model: keras.Model, data: Any) -> Any:
    """A train_step with the value of each row, to which it adds a number."""
    x, y = data
    with tf.GradientTape() as tape:
        values = model.compute_loss(x, y, model(x, training=True)) + 0.1 * tf.reduce_sum(model.weights[0] ** 2)
    model.optimizer.apply(tape.gradient(values, model.trainable_variables), model.trainable_variables)
    return {"loss": tf.reduce_mean(values)}


def learning_rate_of_the_loss(model: keras.Model, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((y - model(x, training=True)) ** 2)
    model.optimizer.learning_rate.assign(0.05 * ops.minimum(1.0, loss))
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return {"loss": loss}


CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[keras.Model], Any]]] = {
    "nan of one row": (lambda: sequential(Standardized()), fitted_and_predicted),
    "pairs": (lambda: sequential(loss=pairs), after_calls_with_one_row),
    "circle": (
        lambda: sequential(loss=keras.losses.Circle(gamma=4)),
        lambda model: model.fit(X, tf.range(22) % 3, batch_size=8, epochs=2, shuffle=False, verbose=0).history,
    ),
    "a static number of rows": (
        lambda: sequential(Static()),
        lambda model: (model.fit(X[:15], Y[:15], 5, verbose=0).history, model.predict(X[:16], 8, verbose=0)),
    ),
    "assigned in a layer": (lambda: sequential(StartsFromABatch()), fitted),
    "accumulated gradients": (with_gradients_that_it_accumulates, fitted),
    "counted rows": (lambda: sequential(CountsRows("int32")), fitted_with_uneven_rows),
    "aggregated by TensorFlow": (lambda: sequential(CountsRows("float64", aggregation="sum")), fitted_with_uneven_rows),
    # The last batch has one row.
    "normalized weights": (
        lambda: sequential(keras.layers.SpectralNormalization(keras.layers.Dense(3))),
        lambda model: model.fit(X, Y, batch_size=7, epochs=2, verbose=0).history,
    ),
    "a loss without reduction": (lambda: sequential(loss=SquaredError()), fitted_with_uneven_rows),
    "a step with a loss without reduction": (
        lambda: functional(penalized, loss=SquaredError()),
        fitted_with_uneven_rows,
    ),
    "Keras's step with a loss without reduction": (
        lambda: functional(lambda model, data: keras.Model.train_step(model, data), loss=SquaredError()),
        fitted_with_uneven_rows,
    ),
    "losses of another shape": (
        lambda: sequential(loss=lambda y, x: ops.reshape((y - x) ** 2, (-1,))),
        fitted_with_uneven_rows,
    ),
    "learning rate of the loss": (lambda: functional(learning_rate_of_the_loss), fitted),
}


@pytest.mark.parametrize("case", CASES)
def test_it_gives_one_device_s_numbers(case: str, as_one_device: Compare) -> None:
    as_one_device(*CASES[case])


def centered(model: keras.Model, data: Any) -> Any:
    """A train_step whose loss has the moving mean of earlier outputs, as in DINO, and which returns vectors."""
    x, y = data
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = tf.reduce_mean((y - outputs + model.center) ** 2)
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    mean = tf.reduce_mean(outputs, axis=0)
    model.center.assign(0.5 * model.center + 0.5 * mean)
    return {"loss": loss, "mean": mean, "sum": tf.reduce_sum(y, axis=0)}


def with_a_center() -> keras.Model:
    model = functional(centered)
    model.center = model.add_weight(shape=(3,), initializer="zeros", trainable=False, name="center")
    return model


class Centered(keras.layers.Layer):
    """Subtracts a moving mean of its earlier inputs, in training, too."""

    def __init__(self, aggregation: str = "none"):
        super().__init__()
        self.aggregation = aggregation

    def build(self, shape: Any) -> None:
        self.center = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, aggregation=self.aggregation
        )

    def call(self, x: Any, training: bool = False) -> Any:
        outputs = x - self.center
        if training:
            self.center.assign(0.7 * self.center + 0.3 * ops.mean(x, axis=0))
        return outputs


@pytest.mark.parametrize(
    "make",
    [with_a_center, lambda: sequential(Centered()), lambda: sequential(Centered("mean"))],
    ids=["of a step", "of a layer", "aggregated by TensorFlow"],
)
def test_statistics_with_which_a_later_step_computes(
    make: Any, as_one_device: Compare, caplog: pytest.LogCaptureFixture
) -> None:
    """They are averaged after each step; vectors that a step returns are means or sums, as numbers are."""
    as_one_device(make, fitted_with_uneven_rows if make is not with_a_center else fitted)
    assert "needs all rows" not in caplog.text


def test_a_vector_of_maxima_needs_all_rows(as_one_device: Compare, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tfdist")

    def step(model: keras.Model, data: Any) -> Any:
        return {"loss": keras.Model.train_step(model, data)["loss"], "most": tf.reduce_max(data[1], axis=0)}

    as_one_device(lambda: functional(step, loss="mse"), fitted)
    assert '"most", which it returns' in caplog.text


def test_tensors_with_other_numbers_of_rows(as_one_device: Compare) -> None:
    """For example, labeled and unlabeled rows in one batch."""

    def train_step(self: Any, data: Any) -> Any:
        (x, y), others = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - self(x, training=True)) ** 2) + tf.reduce_mean(self(others) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

    labeled = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    data = tf.data.Dataset.zip((labeled, tf.data.Dataset.from_tensor_slices(X[::-1]).batch(7)))
    as_one_device(
        lambda: functional(train_step), lambda model: model.fit(data, epochs=2, shuffle=False, verbose=0).history
    )


def test_an_epoch_ends_where_data_of_unknown_length_does(as_one_device: Compare) -> None:
    """Keras requests one more batch after the last in each epoch, which must not affect metrics and the count of updates."""

    def use(model: keras.Model) -> Any:
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(8)
        with pytest.warns(UserWarning, match="ran out of data"):
            history = model.fit(rows, epochs=3, shuffle=False, verbose=0).history
        return history

    as_one_device(lambda: sequential(loss=pairs), use)


def test_a_state_for_each_row(as_one_device: Compare, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> keras.Model:
        inputs = keras.Input(batch_shape=(6, 5, 1))
        model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.LSTM(4, stateful=True)(inputs)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    def use(model: keras.Model) -> Any:
        found = model.fit(X[:18], Y[:18], batch_size=6, epochs=2, shuffle=False, verbose=0).history
        model.layers[1].reset_states()
        return found, model.evaluate(X[:18], Y[:18], batch_size=6, verbose=0), model.predict(X[:12], 6, verbose=0)

    as_one_device(make, use)
    assert "is stateful: it has a state for each row" in caplog.text


def test_a_metric_that_is_no_sum_over_batches(float64: None, single: tfdist.Strategy, as_one_device: Compare) -> None:
    """Callbacks see it after each batch, for which metrics are drained; one replica needs no partition."""

    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.peaks.append(logs["peak"])

    def use(model: keras.Model) -> Any:
        callback = Logs()
        callback.peaks = []
        data = {"validation_data": (X, Y), "validation_batch_size": 8, "batch_size": 8}
        history = model.fit(X, Y, epochs=2, shuffle=False, verbose=0, callbacks=[callback], **data).history
        return dict(sorted(history.items())), callback.peaks

    def make() -> keras.Model:
        return sequential(metrics=[Peak()])

    as_one_device(make, use)
    assert not differences(*both(single, make, use))
