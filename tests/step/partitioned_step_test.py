"""A Trainer on two replicas computes steps that need all rows of a batch as plain Keras does on one device."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.keras_fit.comparing import differences
from tests.keras_fit.rows import Shared, StartsFromABatch, Static, X, Y
from tests.step.user_metrics import Count, Moving, OfBatches, Peak, root, total

ops = keras.ops
DATA = X[:16], Y[:16]


def contrastive(y: Any, x: Any) -> Any:
    similarities = ops.matmul(x, ops.transpose(y))
    numbers = ops.arange(ops.shape(x)[0])
    return ops.mean(keras.losses.sparse_categorical_crossentropy(numbers, similarities, from_logits=True))


def of_python(y: Any, x: Any) -> Any:
    value = tf.py_function(lambda y, x: tf.reduce_mean((y - x) ** 2) * tf.reduce_max(x), [y, x], x.dtype)
    return tf.ensure_shape(value, [])


def row_by_row(y: Any, x: Any) -> Any:
    """Compares each row with all rows in a loop, whose list of tensors cannot be partitioned."""
    return ops.mean(tf.map_fn(lambda row: ops.sum((row - ops.mean(x + y, axis=0)) ** 2), x))


class Largest(keras.layers.Layer):
    """Subtracts the largest inputs of the previous batch, which it keeps in a variable of TensorFlow."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = tf.Variable(tf.zeros([3], tf.float64), trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        outputs = x - self.largest
        if training:
            self.largest.assign(ops.max(x, axis=0))
        return outputs


class Mixing(keras.layers.Layer):
    """Mixes rows with others in training, by a number that it draws for the batch, as MixUp does."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x: Any, training: bool = False) -> Any:
        share = keras.random.uniform((), seed=self.seed_generator)
        return share * x + (1 - share) * ops.flip(x, axis=0) if training else x


Program = Callable[[], tuple[keras.Model, dict[str, Any]]]  # () -> a model, and how to compile it


def network(*layers: Callable[[], keras.layers.Layer], **compiled: Any) -> Program:
    """Returns a program; metrics are functions, or classes to be called."""

    def make() -> tuple[keras.Model, dict[str, Any]]:
        metrics = [metric() if isinstance(metric, type) else metric for metric in compiled.get("metrics", ())]
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), *(layer() for layer in layers)])
        return model, {"loss": "mse", **compiled, "metrics": metrics, "optimizer": keras.optimizers.SGD(0.05)}

    return make


def recurrent() -> tuple[keras.Model, dict[str, Any]]:
    inputs = keras.Input(batch_shape=(8, 5))
    states = keras.layers.LSTM(4, stateful=True)(keras.layers.Reshape((5, 1))(inputs))
    return keras.Model(inputs, keras.layers.Dense(3)(states)), {"loss": "mse", "optimizer": keras.optimizers.SGD(0.05)}


def embedding() -> tuple[keras.Model, dict[str, Any]]:
    layers = [keras.layers.Embedding(6000, 8), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
    return model, {"loss": contrastive, "optimizer": keras.optimizers.SGD(0.05)}


PROGRAMS: dict[str, Program] = {
    "dice": network(loss="dice"),
    "contrastive": network(loss=contrastive),
    "Python": network(loss=of_python),
    "loop over rows": network(loss=row_by_row),
    "variable of TensorFlow": network(Largest),
    "weights assigned in a call": network(StartsFromABatch),
    "static number of rows": network(Static),
    "state for each row": recurrent,
    "rows gathered in a layer": network(Shared),
    "outputs that depend on other rows": network(lambda: keras.layers.Lambda(lambda x: x - ops.mean(x, axis=0))),
    "sum": network(loss=total),
    "metrics of all rows": network(metrics=[root, OfBatches]),
    "metrics that are no sums over batches": network(metrics=[Peak, Count, Moving]),
}


def used(program: Program, strategy: tfdist.Strategy | None, use: str = "Trainer", x: Any = X, **options: Any) -> Any:
    """Returns the results of plain Keras or, on a strategy, of a Trainer or Keras's fit."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, compiled = program()
        fitted = tfdist.Trainer(model, **compiled, **options) if strategy and use == "Trainer" else model
    if fitted is model:
        model.compile(**compiled)
        if strategy:
            tfdist.distribute(model, strategy, **options)
    data, batches = (x[:16], Y[:16]), {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = fitted.fit(*data, **batches, validation_data=data, validation_batch_size=8).history
    predicted = fitted.predict(data[0], batch_size=8, verbose=0)
    return dict(sorted(history.items())), predicted, model.get_weights()


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_gives_one_device_s_numbers(program: str, float64: None, mirrored2: tfdist.Strategy) -> None:
    assert not differences(used(PROGRAMS[program], mirrored2), used(PROGRAMS[program], None))


@pytest.mark.parametrize("use", ["Trainer", "fit"])
@pytest.mark.parametrize(
    "program", ["dice", "rows gathered in a layer", "sum", "metrics that are no sums over batches"]
)
def test_micro_steps_of_it_have_no_effect(
    program: str,
    use: str,
    float64: None,
    single: tfdist.Strategy,
    mirrored2: tfdist.Strategy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    alone = used(PROGRAMS[program], None)
    for strategy in (single, mirrored2):
        caplog.clear()
        assert not differences(used(PROGRAMS[program], strategy, use, accumulate_steps=2), alone)
        assert "accumulate_steps=2 has no effect: a step of sequential needs all rows" in caplog.text


def test_it_is_not_compiled_by_xla(float64: None, mirrored2: tfdist.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    program = PROGRAMS["Python"]
    assert not differences(used(program, mirrored2, jit_compile=True), used(program, None))
    assert "jit_compile has no effect" in caplog.text


def test_draws_for_a_batch_are_those_of_one_replica(
    float64: None, single: tfdist.Strategy, mirrored2: tfdist.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    assert not differences(used(network(Mixing), mirrored2), used(network(Mixing), single))
    assert "Every replica therefore computes the whole batch" in caplog.text


@pytest.mark.parametrize("use", ["Trainer", "fit"])
def test_the_gradient_of_a_table_is_sent_as_rows(
    use: str, float64: None, mirrored2: tfdist.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tfdist")
    words = np.random.default_rng(2).integers(0, 6000, X.shape)
    words[:, 0] = 7  # looked up by several rows
    assert not differences(used(embedding, mirrored2, use, words), used(embedding, None, x=words))
    assert "embeddings is sent as rows: its rows take 1364 bytes, the dense tensor 384000." in caplog.text
    assert "needs all rows of a batch" in caplog.text
