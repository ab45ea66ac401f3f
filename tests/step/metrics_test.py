"""Merged metrics of replicas equal Keras's metrics over all examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.step import metrics

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((16, 3)).astype("float32")
Y = RANDOM.integers(0, 2, (16, 1)).astype("float32")
WEIGHTS = RANDOM.uniform(0, 2, 16).astype("float32")
METRICS = ["binary_accuracy", "auc", "mae"]


def make_model(given=METRICS):
    keras.utils.set_random_seed(0)
    made = [keras.metrics.AUC(name="auc", num_thresholds=20) if name == "auc" else name for name in given]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("sgd", "mse", metrics=made or None, weighted_metrics=["mse"] if made else None)
    keras_internals.build(model, tuple(tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (X, Y, WEIGHTS)))
    return model


def update(strategy, model, first, last):
    def replica_function():
        per = (last - first) // strategy.replicas
        start = first + strategy.collectives.rank * per
        x, y, weight = (tf.constant(a)[start : start + per] for a in (X, Y, WEIGHTS))
        keras_internals.update_metrics(model, y, model(x), weight)

    tf.function(lambda: strategy.run(replica_function), autograph=False)()


@pytest.mark.parametrize("strategy", ["single", "mirrored2", "mirrored4"])
def test_totals_of_calls_and_replicas(strategy, request):
    strategy = request.getfixturevalue(strategy)
    with strategy.scope():
        model = make_model()
    read_and_reset = metrics.compile_read_and_reset(metrics.ModelMetrics(model), strategy)
    totals = []
    for first, last in ((0, 4), (4, 16)):
        update(strategy, model, first, last)
        totals = metrics.add_sums(totals, read_and_reset())
    expected = make_model().evaluate(X, Y, sample_weight=WEIGHTS, batch_size=16, return_dict=True, verbose=0)
    expected.pop("loss")
    assert metrics.ModelMetrics(model).results(totals) == pytest.approx(expected, rel=1e-6)


def test_without_metrics_there_is_no_message(mirrored2, monkeypatch):
    with mirrored2.scope():
        model = make_model([])
    monkeypatch.setattr(mirrored2, "run", None)
    assert metrics.compile_read_and_reset(metrics.ModelMetrics(model), mirrored2)() == []


def test_sums_on_the_host_lose_nothing():
    """Counts above 2^24, where float32 cannot be incremented any more."""
    totals = []
    for _ in range(3):
        totals = metrics.add_sums(totals, [np.array([2.0**24 + 1])])
    assert totals[0][0] == 3 * (2**24 + 1)


class Own(keras.metrics.Metric):
    """A metric with one variable, which it resets or not."""

    def __init__(self, resets=True, **variable):
        super().__init__(name="own")
        self.state, self._resets = self.add_variable((), "zeros", name="value", **variable), resets

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(keras.ops.cast(keras.ops.max(y_pred), self.state.dtype))

    def result(self):
        return self.state

    def reset_state(self):
        if self._resets:
            super().reset_state()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"aggregation": "mean"},
            "must be sums over replicas .* Received: own with own/value, which has aggregation='mean'",
        ),
        ({"resets": False}, "must set all of its variables to 0.* Received: own with own/value, which is not reset"),
    ],
)
def test_a_metric_that_is_no_sum_is_refused(options, message, single):
    with single.scope():
        good, bad = make_model([Own()]), make_model([Own(**options)])
    metrics.check_sums(keras_internals.metrics_of(good))
    with pytest.raises(InputError, match=message):
        metrics.check_sums(keras_internals.metrics_of(bad))


class Confusion(keras.metrics.Metric):
    def __init__(self, rank):
        super().__init__(name="confusion")
        self.counts = self.add_weight(shape=(2,) * rank, initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.counts.assign_add(keras.ops.ones_like(self.counts))

    def result(self):
        return self.counts


def test_a_vector_has_a_number_for_each_element_and_a_matrix_is_refused():
    found = keras_internals.metric_results(make_model([Confusion(1)]), [np.array([3.0, 5.0]), *np.zeros(2)])
    assert found == {"confusion_0": 3.0, "confusion_1": 5.0, "mse": 0.0}
    refused = r"^A metric's result must be .*: confusion with the shape \[2, 2\]\. Return a"
    with pytest.raises(InputError, match=refused):
        keras_internals.metric_results(make_model([Confusion(2)]), [np.zeros((2, 2)), *np.zeros(2)])


def test_losses_of_outputs_are_means_over_replicas_and_batches():
    """Of shares of 3 of 4 rows and of 1; both outputs are recorded by their names."""
    inputs = keras.Input((2,))
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")})
    model.compile("sgd", {"a": "mse", "b": "mae"})
    rows = {name: tf.zeros([3, 1]) for name in ("a", "b")}
    keras_internals.build_losses(model, rows, rows)
    recorded = metrics.ModelMetrics(model)
    for terms, count in (([1.5, 0.25], 3), ([0.5, 1.0], 1)):
        share = metrics.LossShare(tf.constant(0.0), [tf.constant(term) for term in terms], tf.constant(count), 4)
        recorded.update(rows, rows, None, share)
    found = recorded.results([np.asarray(variable) for variable in recorded.variables])
    assert {name: found[name] for name in ("a_loss", "b_loss")} == {"a_loss": 2.0, "b_loss": 1.25}
