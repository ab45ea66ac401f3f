"""Chained stages compute what the whole model computes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.pipelining.cut.example_models import MODELS, build
from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.layers.recompute import recompute
from tfdist.pipelining.cutting import cut_model

pytestmark = [
    pytest.mark.usefixtures("float64"),
    # The mask of an input of a nested model reaches its layers nevertheless.
    pytest.mark.filterwarnings("ignore:.* was passed an input with a mask attached to it"),
]


def chained(cut, inputs, training):
    """Runs the stages one after the other; returns the outputs, and the losses of layers and weights."""
    received, losses = [], []
    for stage in cut.stages:
        outputs, received = stage.call(inputs, received, training)
        losses += [*stage.take_data_losses(), *stage.weight_losses()]
        assert [(x.dtype.name, x.shape.rank) for x in received] == [(x.dtype, len(x.shape)) for x in stage.sent]
        assert all(x.shape.is_compatible_with(crossing.shape) for x, crossing in zip(received, stage.sent, strict=True))
    return outputs, losses


def flat(outputs):
    return keras.tree.flatten(outputs)


def masks(outputs):
    return [keras_internals.mask_and_logits(x)[0] for x in flat(outputs)]


def assert_equal(found, expected):
    keras.tree.assert_same_structure(found, expected)
    for one, other in zip(flat(found), flat(expected), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@pytest.mark.parametrize("name", MODELS)
def test_chained_stages_equal_the_model_bit_for_bit(name):
    for stages, training in ((2, True), (4, True), (3, True), (3, False)):
        model, inputs = build(name)
        expected = model(inputs, training=training)
        total = sum(model.losses)
        updated = [variable.numpy() for variable in model.variables]
        model, inputs = build(name)
        cut = cut_model(model, "auto", stages)
        assert len(cut.stages) == stages and all(stage.calls for stage in cut.stages)
        found, losses = chained(cut, cut.named_inputs(inputs), training)
        assert_equal(found, expected)
        assert_equal(masks(found), masks(expected))
        np.testing.assert_allclose(sum(losses), total, rtol=1e-14)
        assert_equal([variable.numpy() for variable in model.variables], updated)
    inputs = cut.named_inputs(inputs)
    whole = tf.function(lambda x: model(unnamed(model, x), training=False), autograph=False)
    pieces = tf.function(lambda x: chained(cut, x, False)[0], autograph=False)
    assert_equal(pieces(inputs), whole(inputs))


def unnamed(model, inputs):
    return inputs if len(inputs) > 1 else [*inputs.values()][0]


def weighted(outputs):
    """Returns a loss of the outputs that gives each element another gradient."""
    total = 0.0
    for x in flat(outputs):
        total += tf.reduce_sum(
            tf.cast(x, "float64") * tf.cast(tf.reshape(tf.range(tf.size(x)), tf.shape(x)), "float64")
        )
    return total


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_chained_stages_are_those_of_the_model(name):
    model, inputs = build(name)
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = weighted(model(inputs, training=True)) + sum(model.losses)
    expected = tape.gradient(loss, [variable.value for variable in variables])
    model, inputs = build(name)
    cut = cut_model(model, "auto", 4)
    found = dict.fromkeys([variable.path for variable in variables], 0.0)
    received, tapes = [], []
    for stage in cut.stages:
        kept = [x for x, crossing in zip(received, stage.received, strict=True) if crossing.has_gradient]
        with tf.GradientTape() as tape:
            tape.watch(kept)
            outputs, sent = stage.call(cut.named_inputs(inputs), received, training=True)
            loss = [*stage.take_data_losses(), *stage.weight_losses()]
            if stage.is_last:
                loss.append(weighted(outputs))
        tapes.append((tape, kept, sent, loss))
        received = sent
    upstream = []
    for stage, (tape, kept, sent, loss) in zip(reversed(cut.stages), reversed(tapes), strict=True):
        targets = [x for x, crossing in zip(sent, stage.sent, strict=True) if crossing.has_gradient]
        own = [variable.value for variable in stage.variables.trainable]
        gradients = tape.gradient([*targets, *loss], [*kept, *own], [*upstream, *(tf.ones([], x.dtype) for x in loss)])
        upstream = [
            tf.zeros_like(x) if gradient is None else gradient
            for x, gradient in zip(kept, gradients[: len(kept)], strict=True)
        ]
        for variable, gradient in zip(stage.variables.trainable, gradients[len(kept) :], strict=True):
            if gradient is not None:
                found[variable.path] += tf.convert_to_tensor(gradient)
    for variable, gradient in zip(variables, expected, strict=True):
        expected_gradient = 0.0 if gradient is None else tf.convert_to_tensor(gradient)
        np.testing.assert_allclose(found[variable.path], expected_gradient, rtol=1e-11, atol=1e-12)


def test_received_tensors_are_left_without_masks():
    model, inputs = build("masked")
    cut = cut_model(model, "first", 2)
    inputs = cut.named_inputs(inputs)
    _, sent = cut.stages[0].call(inputs, [], training=False)
    copies = [tf.identity(x) for x in sent]
    cut.stages[1].call(inputs, copies, training=False)
    assert masks(copies) == [None] * len(copies)


@pytest.mark.parametrize("name", ["mlp", "sequential"])  # a nested model is recomputed, and so called, as a whole
def test_mixed_precision_and_recomputation_are_those_of_the_model(name):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model, inputs = build(name)
    expected = model(inputs, training=True)
    model, inputs = build(name)
    cut = cut_model(recompute(model), "auto", 3)
    found, _ = chained(cut, cut.named_inputs(inputs), True)
    assert_equal(tf.cast(found, "float32"), tf.cast(expected, "float32"))


def test_a_layer_that_cannot_be_traced_is_refused_in_one_line():
    """Keras's random rotation multiplies numbers of different dtypes in float64, on one device, too."""
    inputs = keras.Input((4, 4, 1))
    model = keras.Model(inputs, keras.layers.Flatten()(keras.layers.RandomRotation(0.1)(inputs)))
    with pytest.raises(InputError, match="before training. Received: TypeError: .*RandomRotation.*Change the layer"):
        cut_model(model, "auto", 2)
