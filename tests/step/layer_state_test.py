"""State that layers of a user assign in training: means over rows are averaged over replicas, other state is refused."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tests.workers.row_dependence import Centering
from tfdist.errors import InputError

ops = keras.ops
X, Y = np.random.default_rng(0).normal(size=(2, 48, 4))


class Stateful(keras.layers.Layer):
    """Assigns a function of its state and of its rows."""

    def __init__(self, update: Callable[[Any, Any], Any], dtype_of_state: str = "float64"):
        super().__init__(name="stateful")
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype=dtype_of_state, name="state")
        self._update = update

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.state.assign(ops.cast(self._update(self.state, x), self.state.dtype))
        return x


class Codebook(keras.layers.Layer):
    """Replaces rows by the nearest of some vectors, which are moving means of these rows (VQ-VAE, appendix A.1)."""

    def __init__(self, gather: Callable[[Any], Any]):
        super().__init__(name="codebook")
        values = np.random.default_rng(1).normal(size=(5, 4))
        self.vectors, self.sums = self._state("vectors", values), self._state("sums", values)
        self.counts = self._state("counts", np.ones(5))
        self._gather = gather

    def _state(self, name: str, value: Any) -> Any:
        return self.add_weight(
            name=name, shape=value.shape, initializer=lambda shape, dtype: ops.cast(value, dtype), trainable=False
        )

    def call(self, x: Any, training: bool = False) -> Any:
        distances = ops.sum(ops.square(x[:, None] - self.vectors), axis=-1)
        nearest = ops.one_hot(ops.argmin(distances, axis=-1), 5, dtype=x.dtype)
        found = ops.matmul(nearest, self.vectors)
        if training:
            rows, chosen = self._gather(x), self._gather(nearest)
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(chosen, axis=0))
            self.sums.assign(0.9 * self.sums + 0.1 * ops.matmul(ops.transpose(chosen), rows))
            self.vectors.assign(self.sums / (self.counts[:, None] + 1e-5))
        self.add_loss(0.1 * ops.mean(ops.square(x - ops.stop_gradient(found))))
        return x + ops.stop_gradient(found - x)


def trained(strategy: tfdist.Strategy, make: Callable[[], keras.layers.Layer], **options: Any) -> tuple[Any, Any]:
    """Returns the losses of epochs, and the weights."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input([4])
        normalized = keras.layers.BatchNormalization(trainable=False)(keras.layers.Dense(4)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(4)(make()(normalized)))
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.1), loss="mse", **options)
    losses = trainer.fit(X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0).history["loss"]
    return losses, model.get_weights()


def assert_equal(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-9)
    for ours, whole in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: Centering(), lambda: Codebook(tfdist.gather_rows)], ids=["mean", "gathered"])
@pytest.mark.parametrize("balance", ["equal", "weights(3,2,1)"])
def test_state_that_later_steps_use_is_that_of_one_device(
    make: Any, balance: str, single: tfdist.Strategy, mirrored3: tfdist.Strategy, float64: None
) -> None:
    assert_equal(trained(mirrored3, make, balance=balance), trained(single, make))


CASES: dict[str, Callable[[], keras.layers.Layer]] = {
    "steps": lambda: Stateful(lambda state, x: state + 1, "int64"),
    "steps as floats": lambda: Stateful(lambda state, x: 0.5 * state + 1),
    "rows": lambda: Stateful(lambda state, x: ops.cast(state, x.dtype) + ops.sum(ops.ones_like(x)), "int64"),
    "rows as floats": lambda: Stateful(lambda state, x: state + ops.sum(ops.ones_like(x))),
    "whether any": lambda: Stateful(lambda state, x: ops.any(x[:, 0] > 0), "bool"),
    "mean": lambda: Stateful(lambda state, x: 0.9 * state + 0.1 * ops.mean(x)),
    "codebook": lambda: Codebook(lambda rows: rows),
    "codebook of all rows": lambda: Codebook(tfdist.gather_rows),
}


@pytest.mark.parametrize("case", CASES)
def test_state_is_that_of_one_device(
    case: str, single: tfdist.Strategy, mirrored2: tfdist.Strategy, float64: None
) -> None:
    assert_equal(trained(mirrored2, CASES[case]), trained(single, CASES[case]))


def test_one_replica_may_count_rows_at_once(single: tfdist.Strategy, float64: None) -> None:
    make = CASES["rows"]
    for options in ({}, {"accumulate_steps": 2}):
        _, weights = trained(single, make, **options)
        assert 2 * X.size in [weight for weight in weights if weight.shape == ()]


class Masked(keras.layers.Layer):
    """Computes with a large constant and with a center."""

    def __init__(self, aggregation: str):
        super().__init__(name="masked")
        mask = np.array([0, 0, 0, -1e38])
        self.mask = self._state("mask", "mean", lambda shape, dtype: ops.cast(mask, dtype), dtype="float32")
        self.center = self._state("center", aggregation, "zeros")

    def _state(self, name: str, aggregation: str, initializer: Any, **options: Any) -> Any:
        given = {"name": name, "aggregation": aggregation, "initializer": initializer, **options}
        return self.add_weight(shape=(4,), trainable=False, **given)

    def call(self, x: Any, training: bool = False) -> Any:
        masked = ops.softmax(x - self.center + ops.cast(self.mask, x.dtype))
        if training:
            self.center.assign(0.9 * self.center + 0.1 * ops.mean(x, axis=0))
        return masked


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize("aggregation", ["mean", "none"])
def test_constants_stay_and_aggregations_do_not_matter(
    micro_steps: int, aggregation: str, single: tfdist.Strategy, mirrored2: tfdist.Strategy, float64: None
) -> None:
    assert_equal(
        trained(mirrored2, lambda: Masked(aggregation), accumulate_steps=micro_steps),
        trained(single, lambda: Masked(aggregation)),
    )


def test_float32_counters_of_steps_are_exact(mirrored3: tfdist.Strategy) -> None:
    counting = functools.partial(Stateful, lambda state, x: state + 1, "float32")
    _, weights = trained(mirrored3, counting, jit_compile=True, balance="weights(3,3,1)")
    assert 8 in [weight for weight in weights if weight.shape == ()]


class Annealed(keras.layers.Layer):
    """Scales by a number that grows in each step."""

    def __init__(self, dtype_of_state: str):
        super().__init__(name="annealed")
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype=dtype_of_state, name="steps")

    def call(self, x: Any, training: bool = False) -> Any:
        scaled = x * ops.tanh(0.1 * ops.cast(self.steps, x.dtype)) if training else x
        if training:
            self.steps.assign_add(ops.cast(1, self.steps.dtype))
        return scaled


@pytest.mark.parametrize(
    ("replicas", "options"),
    [(1, {}), (2, {}), (2, {"jit_compile": True})],
    ids=["one", "two", "XLA"],
)
def test_micro_steps_do_not_change_the_result(
    replicas: int, options: dict[str, Any], single: tfdist.Strategy, mirrored2: tfdist.Strategy, float64: None
) -> None:
    def both() -> keras.layers.Layer:
        normalized = keras.layers.SpectralNormalization(keras.layers.Dense(4))
        return keras.Sequential([Centering(), Annealed("int64"), Stateful(lambda state, x: state + 1), normalized])

    assert_equal(
        trained({1: single, 2: mirrored2}[replicas], both, accumulate_steps=4, **options), trained(single, both)
    )


def test_micro_steps_on_a_mesh_do_not_normalize_weights(mesh4x1: tfdist.Strategy) -> None:
    def normalized() -> keras.layers.Layer:
        return keras.layers.SpectralNormalization(keras.layers.Dense(4, name="normalized"))

    trained(mesh4x1, normalized)
    with pytest.raises(
        InputError, match="Received: accumulate_steps=3 and .*normalized/kernel. Use accumulate_steps=1"
    ):
        trained(mesh4x1, normalized, accumulate_steps=3)


def test_replicas_that_train_locally_keep_their_own_state(mirrored2: tfdist.Strategy, float64: None) -> None:
    trained(mirrored2, CASES["rows"], sync="local_sgd(period=2)")
    own, _ = trained(mirrored2, lambda: Centering(), sync="local_sgd(period=100)")
    together, _ = trained(mirrored2, lambda: Centering())
    assert not np.allclose(own, together, rtol=1e-9)
