"""Names of what a step reduces, in models in which several variables have the same path."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist.step.settings import named_specs, sparse_gradient_names

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.integers(0, 50, (16, 2)), RANDOM.standard_normal((16, 1)).astype("float32")


def tower(name):
    tokens = keras.Input((1,))
    x = keras.layers.Embedding(50, 16, name="tokens")(tokens)
    return keras.Model(tokens, keras.layers.Dense(16, "tanh", name="fc1")(x), name=name)


@pytest.fixture(autouse=True)
def _fresh_names():
    keras.utils.clear_session(free_memory=False)


def towers():
    keras.utils.set_random_seed(0)
    both = keras.Input((2,), dtype="int32")
    outputs = [tower(name)(both[:, i : i + 1]) for i, name in enumerate(("left", "right"))]
    x = keras.layers.Flatten()(keras.layers.Concatenate()(outputs))
    return keras.Model(both, keras.layers.Dense(1, name="score")(x))


def test_names_are_paths_with_a_number_if_variables_share_one():
    specs = named_specs(towers().trainable_variables, "loss")
    twice = ["tokens/embeddings", "fc1/kernel", "fc1/bias"]
    assert [spec.name for spec in specs] == [
        *twice, *(f"{path}#2" for path in twice), "score/kernel", "score/bias", "loss"
    ]  # fmt: skip
    assert [tuple(spec.shape) for spec in specs[-2:]] == [(1,), ()]


def weights_after(strategy, **options):
    with strategy.scope():
        trainer = tfdist.Trainer(towers(), optimizer=keras.optimizers.SGD(0.1), loss="mse", **options)
    trainer.fit(X, Y, batch_size=8, steps=4)
    return trainer.model.get_weights()


@pytest.mark.parametrize("sync", ["every_step", "local_sgd(period=1)"])
def test_the_weights_are_those_without_compression(sync, mirrored2, single):
    found = weights_after(mirrored2, compression_min_bytes=0, compression="topk(ratio=1)", sync=sync)
    for one, other in zip(found, weights_after(single), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_rows_of_embeddings_are_sent_for_both(mirrored2, single, monkeypatch):
    monkeypatch.setattr("tfdist.step.settings.SPARSE_MIN_BYTES", 0)
    assert sparse_gradient_names(towers()) == {"tokens/embeddings", "tokens/embeddings#2"}
    for one, other in zip(weights_after(mirrored2), weights_after(single), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_rule_holds_for_every_variable_of_its_path(mirrored2):
    with mirrored2.scope():
        trainer = tfdist.Trainer(
            towers(), optimizer="sgd", loss="mse", compression="path=.*/kernel:onebit", compression_min_bytes=0
        )
    trainer.build(tfdist.data.ArraySource((X, Y)))
    assert trainer.program.steps.compressed_names() == ["fc1/kernel", "fc1/kernel#2", "score/kernel"]
