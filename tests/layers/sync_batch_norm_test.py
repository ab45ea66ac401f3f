"""Synchronized BatchNorm on replicas equals BatchNorm on one device with all rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import OneReplica, RecordingCollectives, collectives_scope
from tfdist.layers import SyncBatchNormalization

RANDOM = np.random.default_rng(0)
BORDERS = {1: [0, 13], 2: [0, 5, 13], 4: [0, 3, 3, 9, 13]}  # uneven; one part is empty


def step(strategy, make, x, weights, mask=None):
    """Returns outputs y, gradients of sum(weights * sin(y)) for input, gamma and beta, and the new moving statistics."""
    with strategy.scope():
        layer = make()
        layer.build(x.shape)
        rows = np.random.default_rng(9)
        for variable in layer.trainable_variables:
            variable.assign(rows.uniform(0.5, 1.5, variable.shape))
    borders = tf.constant(BORDERS[strategy.replicas])
    collectives = strategy.collectives

    def replica_function():
        mine = slice(borders[collectives.rank], borders[collectives.rank + 1])
        inputs, weight = tf.constant(x)[mine], tf.constant(weights)[mine]
        masks = {} if mask is None else {"mask": tf.constant(mask)[mine]}
        values = [variable.value for variable in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True, **masks)
            loss = tf.reduce_sum(weight * tf.sin(outputs))
        by_inputs, *by_variables = tape.gradient(loss, [inputs, *values])
        return outputs, by_inputs, collectives.all_reduce(by_variables, name="gradients")

    @tf.function(autograph=False)
    def run():
        outputs, by_inputs, by_variables = strategy.run(replica_function)
        return (
            tf.concat(strategy.local(outputs), 0),
            tf.concat(strategy.local(by_inputs), 0),
            *(strategy.local(gradient)[0] for gradient in by_variables),
        )

    results = [np.asarray(tensor) for tensor in run()]
    statistics = [strategy.local(v.value) for v in layer.non_trainable_variables]
    for values in statistics:
        for value in values:
            np.testing.assert_array_equal(value, values[0])
    return [*results, *(np.asarray(values[0]) for values in statistics)]


@pytest.mark.parametrize("strategy", ["single", "mirrored2", "mirrored4"])
@pytest.mark.parametrize(
    ("shape", "axis", "masked"),
    [((13, 3), -1, False), ((13, 4, 2, 3), -1, False), ((13, 3, 5), 1, False), ((13, 5, 3), -1, True)],
    ids=["rows", "images", "channels first", "masked"],
)
def test_replicas_are_one_device(strategy, shape, axis, masked, request, float64):
    strategy = request.getfixturevalue(strategy)
    x = RANDOM.normal(3.0, 2.0, shape)
    weights = RANDOM.standard_normal(shape)
    mask = RANDOM.uniform(size=shape[:2]) > 0.4 if masked else None
    single = request.getfixturevalue("single")
    options = {"axis": axis, "momentum": 0.7}
    expected = step(single, lambda: keras.layers.BatchNormalization(**options), x, weights, mask)
    found = step(strategy, lambda: SyncBatchNormalization(**options), x, weights, mask)
    assert len(found) == 6
    # With a mask, Keras divides by the count plus 1e-7.
    rtol, atol = (1e-5, 1e-6) if masked else (1e-10, 1e-12)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
    one = step(single, lambda: SyncBatchNormalization(**options), x, weights, mask)
    for a, b in zip(found, one, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_digits_where_the_mean_is_large(mirrored2, single):
    """With mean / deviation = 1000 in float32, E[x^2] - E[x]^2 has no correct digit, but merging M2 has."""
    x = np.random.default_rng(1).normal(1000.0, 1.0, (13, 3)).astype("float32")
    weights = np.ones((13, 3), "float32")
    exact = (x.astype("float64") - x.mean(0, dtype="float64")) ** 2
    *_, beta, _, _ = step(single, lambda: keras.layers.BatchNormalization(momentum=0.0), x, weights)

    def errors(make):
        """Returns those of the gradient of beta and of the variance."""
        *_, gradient, _, variance = step(mirrored2, make, x, weights)
        return np.linalg.norm(gradient - beta) / np.linalg.norm(beta), np.max(np.abs(variance / exact.mean(0) - 1))

    gradient, variance = errors(lambda: SyncBatchNormalization(momentum=0.0))
    of_keras = errors(lambda: keras.layers.BatchNormalization(momentum=0.0, synchronized=True))
    assert gradient < 1e-3 and variance < 1e-4
    assert of_keras[0] > 10 * gradient and of_keras[1] > 1e-2


def test_messages_are_as_documented():
    """For C channels and N replicas: 2 C + 1 numbers forward, N (2 C + 1) backward; nothing in inference."""
    recording = RecordingCollectives(OneReplica())
    layer = SyncBatchNormalization()
    x = tf.ones([4, 5])
    with collectives_scope(recording), tf.GradientTape() as tape:
        tape.watch(x)
        outputs = layer(x, training=True)
        tape.gradient(outputs, x)
    assert [call.operation for call in recording.calls] == ["all_gather", "reduce_scatter"]
    assert recording.payload_bytes == 2 * 4 * (2 * 5 + 1)
    with collectives_scope(recording):
        layer(x, training=False)
    assert len(recording.calls) == 2


def test_inference_is_keras_s():
    ours, keras_own = SyncBatchNormalization(epsilon=0.1), keras.layers.BatchNormalization(epsilon=0.1)
    x = RANDOM.standard_normal((6, 3)).astype("float32")
    for layer in (ours, keras_own):
        layer.build(x.shape)
        layer.set_weights([np.full(3, value, "float32") for value in (2.0, 1.0, 0.5, 3.0)])
    np.testing.assert_array_equal(ours(x), keras_own(x))


def test_no_rows_at_all_give_no_nan():
    layer = SyncBatchNormalization()
    outputs = layer(tf.ones([2, 4, 3]), training=True, mask=tf.zeros([2, 4], tf.bool))
    assert np.all(np.isfinite(outputs))
    assert np.all(np.isfinite(layer.moving_variance))


def test_configuration_there_and_back():
    layer = SyncBatchNormalization(axis=1, momentum=0.5, epsilon=0.01, center=False, name="norm")
    config = keras.saving.serialize_keras_object(layer)
    copy = keras.saving.deserialize_keras_object(config)
    assert type(copy) is SyncBatchNormalization
    assert copy.get_config() == layer.get_config()
    assert not {"synchronized", "renorm"} & set(layer.get_config())


@pytest.mark.parametrize("name", ["synchronized", "renorm"])
def test_arguments_that_it_has_not(name):
    with pytest.raises(ValueError, match=f"has no `{name}`"):
        SyncBatchNormalization(**{name: True})
    SyncBatchNormalization(**{name: False})
