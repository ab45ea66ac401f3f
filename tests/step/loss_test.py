"""The loss of a batch that is distributed over replicas equals Keras's loss of the global batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.adding_loss import AddsLoss, mean_square
from tfdist import keras_internals
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.step import loss

ROWS = 13
BORDERS = {1: [0, 13], 2: [0, 4, 13], 4: [0, 5, 6, 10, 13]}  # uneven on purpose
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((ROWS, 6))
Y = RANDOM.integers(0, 3, ROWS)
Z = RANDOM.standard_normal((ROWS, 2))
WEIGHTS = RANDOM.uniform(0, 2, ROWS) * (RANDOM.uniform(size=ROWS) > 0.3)
TOKENS = RANDOM.integers(1, 9, (ROWS, 5)) * (np.arange(5) < RANDOM.integers(1, 6, (ROWS, 1)))
NEXT = RANDOM.integers(0, 4, (ROWS, 5))


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def dense():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])


def masked(mask_zero=True):
    layers = [keras.layers.Embedding(9, 4, mask_zero=mask_zero), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])


def two_outputs(as_dict=False):
    inputs = keras.Input((6,))
    a = keras.layers.Dense(3, name="a")(inputs)
    b = keras.layers.Dense(2, name="b")(inputs)
    return keras.Model(inputs, {"a": a, "b": b} if as_dict else [a, b])


def regularized(add_loss=False):
    options = {"kernel_regularizer": "l2", "bias_regularizer": "l1", "bias_initializer": "ones"}
    hidden = keras.layers.Dense(4, activity_regularizer=keras.regularizers.L2(0.1), **options)
    more = [AddsLoss(lambda x: 0.3 * mean_square(x))] if add_loss else []
    return keras.Sequential([keras.Input((6,)), hidden, *more, keras.layers.Dense(3, **options)])


def scalar_function(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - y_true))


def with_weights():
    return crossentropy(reduction="mean_with_sample_weight")


def summed():
    return crossentropy(reduction="sum")


def unreduced():
    return crossentropy(reduction="none")


def of_both():
    return [crossentropy(), "mse"]


def by_output():
    return {"a": crossentropy(), "b": "mse"}


def named_outputs():
    return two_outputs(as_dict=True)


TARGETS = RANDOM.standard_normal((ROWS, 3))
# The model, its loss and loss weights, and the batch.
CASES = {
    "plain": (dense, {"loss": crossentropy}, (X, Y)),
    "weights": (dense, {"loss": crossentropy}, (X, Y, WEIGHTS)),
    "weights of all": (dense, {"loss": with_weights}, (X, Y, WEIGHTS)),
    "integer weights of all": (dense, {"loss": with_weights}, (X, Y, (3 * WEIGHTS).astype("int64"))),
    "mean_with_sample_weight without": (dense, {"loss": with_weights}, (X, Y)),
    "sum": (dense, {"loss": summed}, (X, Y)),
    "sum of weights": (dense, {"loss": summed}, (X, Y, WEIGHTS)),
    "tokens": (lambda: masked(False), {"loss": crossentropy}, (TOKENS, NEXT)),
    "mask": (masked, {"loss": crossentropy}, (TOKENS, NEXT)),
    "mask and weights": (masked, {"loss": crossentropy}, (TOKENS, NEXT, WEIGHTS[:, None])),
    "no reduction": (dense, {"loss": lambda: crossentropy(reduction=None)}, (X, Y)),
    "no reduction, weights": (dense, {"loss": unreduced}, (X, Y, WEIGHTS)),
    "no reduction, mask": (masked, {"loss": unreduced}, (TOKENS, NEXT)),
    "no reduction, two outputs": (
        two_outputs,
        {"loss": lambda: [unreduced(), keras.losses.MeanSquaredError(reduction="none")], "loss_weights": [0.3, 2.0]},
        (X, (Y, Z)),
    ),
    "mask, sum": (masked, {"loss": summed}, (TOKENS, NEXT)),
    "mask, mean_with_sample_weight": (masked, {"loss": with_weights}, (TOKENS, NEXT, WEIGHTS[:, None])),
    "weights of tokens": (masked, {"loss": crossentropy}, (TOKENS, NEXT, RANDOM.uniform(size=(ROWS, 5)))),
    "two outputs": (two_outputs, {"loss": of_both}, (X, (Y, Z))),
    "two outputs, weights as a list": (two_outputs, {"loss": of_both, "loss_weights": [0.3, 2.0]}, (X, (Y, Z))),
    "two outputs, weights as a dict": (
        named_outputs,
        {"loss": by_output, "loss_weights": {"b": 3.0, "a": 0.5}},
        (X, {"b": Z, "a": Y}),
    ),
    "two outputs, one sample weight": (named_outputs, {"loss": by_output}, (X, {"a": Y, "b": Z}, WEIGHTS)),
    "two outputs, two sample weights": (
        named_outputs,
        {"loss": by_output},
        (X, {"a": Y, "b": Z}, {"a": WEIGHTS, "b": WEIGHTS**2}),
    ),
    "two outputs, one loss": (named_outputs, {"loss": lambda: {"b": "mae"}}, (X, {"a": Y, "b": Z})),
    "regularizers": (regularized, {"loss": crossentropy}, (X, Y)),
    "add_loss": (lambda: regularized(True), {"loss": crossentropy}, (X, Y, WEIGHTS)),
    "add_loss alone": (lambda: regularized(True), {"loss": lambda: None}, (X, Y)),
    "a function's scalar": (dense, {"loss": lambda: scalar_function}, (X, TARGETS)),
    "rows of matrices": (dense, {"loss": lambda: "mse"}, (X, TARGETS)),
}


def compiled(strategy, make, options, batch):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile("sgd", **{k: v() if callable(v) else v for k, v in options.items()})
        specs = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), batch)
        keras_internals.build(model, specs)
    return model


def on_replicas(strategy, batch, function):
    """Runs a function of (x, y, sample_weight) on the rows of each replica."""
    borders = tf.constant(BORDERS[strategy.replicas])
    tensors = tf.nest.map_structure(tf.constant, batch)

    @tf.function(autograph=False)
    def step():
        def replica_function():
            rank = strategy.collectives.rank
            mine = tf.nest.map_structure(lambda t: t[borders[rank] : borders[rank + 1]], tensors)
            return function(*keras.utils.unpack_x_y_sample_weight(mine))

        return strategy.local(strategy.run(replica_function))

    return step()


def keras_losses(model, batch):
    """Returns the loss that Keras differentiates and the one that it logs: without reduction, the sum and the mean."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(tf.nest.map_structure(tf.constant, batch))
    outputs = model(x, training=True)
    found = model.compute_loss(x, y, outputs, weight, training=True)
    return float(tf.reduce_sum(found)), float(tf.reduce_mean(found))


@pytest.mark.parametrize("strategy", ["single", "mirrored4"])
@pytest.mark.parametrize("case", CASES)
def test_training_loss(case, strategy, float64, request):
    strategy = request.getfixturevalue(strategy)
    make, options, batch = CASES[case]
    model = compiled(strategy, make, options, batch)

    def summand(x, y, weight):
        outputs = model(x, training=True)
        parts = loss.terms(model, y, outputs, weight)
        totals = loss.totals(parts, ROWS, strategy.collectives)
        losses = keras_internals.data_losses(model), keras_internals.weight_losses(model)
        return tf.stack(loss.training_losses(losses, parts, totals, tf.shape(x)[0], ROWS)[:2])

    found = np.sum(on_replicas(strategy, batch, summand), axis=0)
    assert found == pytest.approx(keras_losses(model, batch), rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_evaluation_loss(case, mirrored4, float64):
    make, options, batch = CASES[case]
    model = compiled(mirrored4, make, options, batch)

    def sums(x, y, weight):
        outputs = model(x, training=False)
        return loss.evaluation_sums(model, loss.terms(model, y, outputs, weight), tf.shape(x)[0], ROWS)

    total = sum(np.asarray(part) for part in on_replicas(mirrored4, batch, sums))
    of_weights = mirrored4.parts.regularization(model)
    assert loss.evaluation_loss(model, total, of_weights) == pytest.approx(keras_losses(model, batch)[1], rel=1e-12)


@pytest.mark.parametrize(("case", "messages"), [("weights", 0), ("tokens", 0), ("sum", 0), ("mask", 1)])
def test_denominators_are_asked_for_only_where_they_depend_on_the_data(single, float64, case, messages):
    make, options, batch = CASES[case]
    model = compiled(single, make, options, batch)
    recording = RecordingCollectives(OneReplica())
    x, y, weight = keras.utils.unpack_x_y_sample_weight(tf.nest.map_structure(tf.constant, batch))
    loss.totals(loss.terms(model, y, model(x), weight), ROWS, recording)
    assert [call.operation for call in recording.calls] == ["all_reduce"] * messages
    assert recording.payload_bytes == 8 * messages


def test_all_weights_0_give_a_loss_of_0(single, float64):
    make, options, _ = CASES["mask, mean_with_sample_weight"]
    batch = (TOKENS, NEXT, np.zeros((ROWS, 1)))
    model = compiled(single, make, options, batch)
    parts = loss.terms(model, tf.constant(NEXT), model(tf.constant(TOKENS)), tf.constant(batch[2]))
    totals = loss.totals(parts, ROWS, OneReplica())
    assert float(loss.training_losses(([], []), parts, totals, tf.constant(ROWS), ROWS)[0]) == 0.0


def test_names_that_keras_resolves_by_shapes_are_left_to_it(mirrored2):
    with mirrored2.scope():
        trainer = tfdist.Trainer(dense(), optimizer="sgd", loss="crossentropy")
    trainer.fit((X, Y), batch_size=4, steps=1)
