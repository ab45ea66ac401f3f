"""The passes of a stage as functions: equal to a tape's, traced once, without an operation that is computed twice."""

import collections
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.collectives import OneReplica
from tfdist.pipelining.execution import Execution
from tfdist.pipelining.passes import Forward, Passes
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.stage_costs import CrossingSpec

ROWS, TOKENS, WIDTH = 4, 5, 6
layers = keras.layers


def attending(x: keras.KerasTensor) -> keras.KerasTensor:
    normal = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 3)(normal, normal)])
    return layers.Dense(WIDTH)(layers.Dropout(0.5, seed=4)(layers.Dense(9, activation="gelu")(x)))


def recurrent(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.GRU(WIDTH, return_sequences=True)(layers.LSTM(7, return_sequences=True)(x))


def normalized(x: keras.KerasTensor) -> keras.KerasTensor:
    x = layers.BatchNormalization()(layers.Conv1D(7, 3, padding="same")(x))
    return layers.Conv1D(WIDTH, 3, padding="same")(layers.ActivityRegularization(l2=0.1)(layers.ReLU()(x)))


def passing(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.Activation("linear")(x)


MODELS = {each.__name__: each for each in (attending, recurrent, normalized, passing)}


class Part:
    """A stage whose input and output have the same shape."""

    received = sent = (CrossingSpec(tf.TensorSpec([ROWS, TOKENS, WIDTH], tf.float64), True),)

    def __init__(self, body: Callable[[keras.KerasTensor], keras.KerasTensor]):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((TOKENS, WIDTH))
        self.model = keras.Model(inputs, body(inputs))
        self.variables = [variable.value for variable in self.model.trainable_variables]
        self.calls = 0

    def arguments(self, micro_batch: int) -> list[tf.Tensor]:
        return [tf.constant(0.1 + micro_batch, tf.float64)]

    def forward(self, arguments: list[tf.Tensor], received: list[tf.Tensor]) -> Forward:
        self.calls += 1
        y = self.model(received[0], training=True)
        own = tf.add_n([arguments[0] * tf.reduce_sum(y**2), *self.model.losses])
        return Forward([y], own, tf.reduce_sum(y))

    def gradients(self, found):
        return [None if each is None else tf.convert_to_tensor(each) for each in found]

    def state(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in self.model.non_trainable_variables]


@pytest.fixture(autouse=True)
def in_float64(float64: None) -> None:
    """All of it is exact up to rounding."""


def tensors(seed: int) -> list[tf.Tensor]:
    return [tf.constant(x) for x in np.random.default_rng(seed).standard_normal([2, ROWS, TOKENS, WIDTH])]


def by_tape(part: Part) -> list[list[tf.Tensor]]:
    """Returns results and gradients of two micro-batches, each of which is computed at once."""
    found = []
    for number, (x, upstream) in enumerate(zip(tensors(0), tensors(1), strict=True)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            sent, loss, share = part.forward(part.arguments(number), [x])
        sources = [*part.variables, x]
        ones = tf.ones([], tf.float64)
        found.append([*sent, share, *tape.gradient([*sent, loss], sources, output_gradients=[upstream, ones])])
    return found


def by_passes(part: Part, passes: Passes, is_split: bool) -> list[list[tf.Tensor]]:
    """Returns the same; all of both forward passes comes first, and weights come last."""
    first = [passes.forward(part.arguments(number), [x]) for number, x in enumerate(tensors(0))]
    pairs = list(zip(first, tensors(1), strict=True))
    if is_split:
        inputs = [passes.backward_input(one.residuals, [upstream]) for one, upstream in pairs]
        last = [(passes.backward_weight(residuals), gradients) for gradients, residuals in inputs]
    else:
        last = [passes.backward(one.residuals, [upstream]) for one, upstream in pairs]
    return [[*one.sent, one.share, *own, *others] for one, (own, others) in zip(first, last, strict=True)]


@pytest.mark.parametrize(
    ("name", "is_split", "is_eager"),
    [
        ("attending", False, False),
        ("attending", True, True),
        ("recomputed", True, False),
        ("recurrent", True, False),
        ("normalized", True, False),
        ("passing", True, True),
    ],
)
def test_passes_equal_those_of_a_tape(name: str, is_split: bool, is_eager: bool) -> None:
    pair = [Part(MODELS.get(name, attending)) for _ in range(2)]
    if name == "recomputed":
        for part in pair:
            tfdist.recompute(part.model)
    wanted = by_tape(pair[0])
    passes = Passes(pair[1], pair[1].arguments(0), is_split)
    assert pair[1].calls == 1
    call = by_passes if is_eager else tf.function(by_passes, autograph=False)
    found = call(pair[1], passes, is_split)
    assert pair[1].calls == 1
    both = [keras.tree.flatten([results, part.state()]) for results, part in ((found, pair[1]), (wanted, pair[0]))]
    for one, other in zip(*both, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MODELS)
def test_no_operation_is_computed_twice(name: str) -> None:
    """A backward pass in two parts has the operations of one in one part."""
    part = Part(MODELS[name])

    def computed(*functions: tf.types.experimental.ConcreteFunction) -> collections.Counter[str]:
        found = collections.Counter(x.type for each in functions for x in each.graph.get_operations())
        return found - collections.Counter({kind: found[kind] for kind in ("Placeholder", "Identity", "Const", "NoOp")})

    whole, split = (Passes(part, part.arguments(0), is_split) for is_split in (False, True))
    last = computed(split._backward_weight)
    assert computed(split._backward_input, split._backward_weight) == computed(whole._backward)
    # A loop's gradients, of all that it uses, are one operation.
    assert bool(last) is (name in ("attending", "normalized"))


def test_a_backward_pass_uses_the_weights_of_its_forward_pass() -> None:
    part = Part(attending)
    passes = Passes(part, part.arguments(0))
    [x, _], [upstream, _] = tensors(0), tensors(1)
    residuals = passes.forward(part.arguments(0), [x]).residuals
    before = passes.backward(residuals, [upstream])
    for variable in part.variables:
        variable.assign_add(tf.ones_like(variable))
    after = passes.backward(residuals, [upstream])
    for one, other in zip(keras.tree.flatten(before), keras.tree.flatten(after), strict=True):
        np.testing.assert_array_equal(one, other)


def test_variables_without_gradients() -> None:
    part = Part(passing)
    part.variables = [tf.Variable(1.0)]
    whole, split = (Passes(part, part.arguments(0), is_split) for is_split in (False, True))
    residuals, other_residuals = (x.forward(part.arguments(0), tensors(0)[:1]).residuals for x in (whole, split))
    variable_gradients, input_gradients = whole.backward(residuals, tensors(1)[:1])
    assert variable_gradients == [None] and len(input_gradients) == 1
    input_gradients, left = split.backward_input(other_residuals, tensors(1)[:1])
    assert split.backward_weight(left) == [None] and len(input_gradients) == 1


@pytest.mark.parametrize("micro_batches", [1, 6])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_stage_is_traced_once(schedule: str, micro_batches: int) -> None:
    part = Part(attending)
    part.received = part.sent = ()
    forward = part.forward
    part.forward = lambda arguments, received: forward(arguments, tensors(0)[:1])._replace(sent=[])

    def step() -> None:
        Execution(make_schedule(schedule, 1, micro_batches), 0, {0: part}, OneReplica()).run()

    tf.function(step, autograph=False).get_concrete_function()
    assert part.calls == 1


def test_side_effects_for_weights_alone_belong_to_the_second_part() -> None:
    noted: list[str] = []

    def note(x: tf.Tensor, name: str) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(lambda value: noted.append(name) or value, [x], x.dtype), x.shape)

    @tf.custom_gradient
    def noting(x: tf.Tensor, weight: tf.Tensor):
        return x * weight, lambda gradient: (note(gradient, "I"), tf.reduce_sum(note(gradient, "W")))

    part = Part(passing)
    part.variables = [tf.Variable(1.0, dtype=tf.float64)]
    part.forward = lambda arguments, received: Forward(
        [noting(received[0], tf.convert_to_tensor(part.variables[0]))], arguments[0], arguments[0]
    )
    passes = Passes(part, part.arguments(0), split=True)
    _, left = passes.backward_input(passes.forward(part.arguments(0), tensors(0)[:1]).residuals, tensors(1)[:1])
    assert noted == ["I"]
    passes.backward_weight(left)
    assert noted == ["I", "W"]
