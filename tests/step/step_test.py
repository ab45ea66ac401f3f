"""The two halves of a step, and the compiled loop around them."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import models
from tfdist.collectives import RecordingCollectives
from tfdist.data import ArraySource, Pipeline
from tfdist.gradients import Bucketed, Sum
from tfdist.step.compiled_loop import compile_loop
from tfdist.step.gradient_source import GradientSource
from tfdist.step.metrics import ModelMetrics
from tfdist.step.settings import Settings
from tfdist.step.state_store import StateStore
from tfdist.step.step import Step

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.standard_normal((8, 6, 6, 1)).astype("float32")
TOKENS = RANDOM.integers(0, 5, (8, 4))
MODELS = {
    "mlp": ("mlp(hidden=(4,))", (6, 6, 1)),
    "cnn": ("cnn(filters=(2,))", (6, 6, 1)),
    "cnn synchronized": ("cnn(filters=(2,), batch_norm='synchronized')", (6, 6, 1)),
    "transformer": ("transformer(layers=1, width=4, heads=2, ffn=4, dropout=0.1)", (4,)),
    "resnet50": ("resnet50", (32, 32, 3)),
}


def make(strategy, spec, shape, data, batch_size=4):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.build(spec, shape, 5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(model, optimizer="adamw", loss=loss, metrics=["accuracy"])
    trainer.build(ArraySource(data))
    source = GradientSource(model, strategy, StateStore(strategy), Settings(batch_size=batch_size), ModelMetrics(model))
    return model, Step(source, Bucketed(Sum()), StateStore(strategy))


def compiled(step, strategy):
    def computed(batch):
        return strategy.run(step.compute, batch, tf.constant(0, tf.int64), tf.constant(True))

    return tf.function(computed, autograph=False)


def test_every_model_has_a_case():
    assert {spec.partition("(")[0] for spec, _ in MODELS.values()} == set(models.NAMES)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n == "resnet50" else n for n in MODELS])
def test_the_whole_step_compiles_with_xla(single, monkeypatch, name):
    """Forward and backward pass, reduction and update in one program with static shapes, as required by a TPU."""
    monkeypatch.setattr(single, "compiles_replicas", True)
    spec, shape = MODELS[name]
    x = TOKENS[:2] if len(shape) == 1 else RANDOM.standard_normal((2, *shape)).astype("float32")
    y = TOKENS[:2] if len(shape) == 1 else np.array([0, 1])
    model, step = make(single, spec, shape, (x, y), batch_size=2)
    before = [np.array(v) for v in model.trainable_variables]
    x, y = tf.constant(x), tf.constant(y)

    @tf.function(jit_compile=True, autograph=False)
    def whole():
        computed = step.compute((x, y), tf.constant(0, tf.int64), tf.constant(True))
        step.apply(computed, frozenset())
        return computed.loss

    loss = float(single.run(whole))
    assert np.isfinite(loss)
    assert all(np.all(np.isfinite(v)) for v in model.trainable_variables)
    assert any(np.any(a != np.array(v)) for a, v in zip(before, model.trainable_variables, strict=True))
    assert int(model.optimizer.iterations) == 1


def test_the_loop_is_traced_once_and_sends_one_message(mirrored2, monkeypatch):
    """For any number of steps; the loss is sent with the gradients."""
    data = (IMAGES, np.arange(8) % 5)
    monkeypatch.setattr(mirrored2, "collectives", RecordingCollectives(mirrored2.collectives))
    model, step = make(mirrored2, "mlp(hidden=(4,))", (6, 6, 1), data)
    iterator = mirrored2.distribute(Pipeline(ArraySource(data), 4, seed=0).dataset)
    loop: Any = compile_loop(step, mirrored2)
    results = [
        loop(iterator, tf.constant(first, tf.int64), tf.constant(steps), tf.constant(norm))
        for first, steps, norm in ((0, 3, False), (3, 1, True), (4, 5, False))
    ]
    assert loop.experimental_get_tracing_count() == 1
    assert [tuple(result.losses.shape) for result in results] == [(3,), (1,), (5,)]
    assert [float(result.norm) > 0 for result in results] == [False, True, False]
    assert all(bool(result.may_continue) and result.is_finite.numpy().all() for result in results)
    assert all(len(result.compute_seconds) == 2 and float(result.wait_seconds) >= 0 for result in results)
    calls = mirrored2.collectives.calls
    assert [call.operation for call in calls] == ["all_reduce"] * 2, "one for each of the two replicas that were traced"
    assert calls[0].payload_bytes == 4 * (model.count_params() + 1)


def test_the_clock_is_read_before_a_replica_computes(mirrored2):
    """Otherwise computations that occupy all threads would count as waiting for data."""
    data = (IMAGES, np.zeros(8, "int64"))
    _, step = make(mirrored2, "cnn(filters=(2,))", (6, 6, 1), data)
    iterator = mirrored2.distribute(Pipeline(ArraySource(data), 4, seed=0).dataset)
    compute = compiled(step, mirrored2)
    operations = compute.get_concrete_function(next(iterator)).graph.get_operations()
    convolutions = [operation for operation in operations if operation.type == "Conv2D"]
    assert len(convolutions) >= 2
    for convolution in convolutions:
        assert "Timestamp" in {operation.type for operation in _ancestors(convolution)}


def _ancestors(operation: tf.Operation) -> set[tf.Operation]:
    found, waiting = set(), [operation]
    while waiting:
        here = waiting.pop()
        before = {*here.control_inputs, *(tensor.op for tensor in here.inputs)} - found
        found |= before
        waiting.extend(before)
    return found
