"""A model written by `Trainer.save` can be loaded by Keras alone, and makes the same predictions."""

import subprocess
import sys

import keras
import numpy as np

import tfdist
from tfdist import models

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(2.0, 3.0, (16, 6, 6, 1)).astype("float32")
Y = RANDOM.integers(0, 3, 16)
READER = """
import sys
import keras
import numpy as np
x = np.load("x.npy")
for name in sys.argv[1:]:
    model = keras.saving.load_model(f"{name}.keras")
    np.save(f"{name}.npy", model(x, training=False))
    assert type(model.layers[2]) is keras.layers.BatchNormalization
assert not any(name.startswith("tfdist") for name in sys.modules)
"""


OWN_OPTIMIZERS = {  # by the statistics of the model
    "synchronized": lambda: tfdist.optimizers.LARS(0.1),
    "local": lambda: keras.optimizers.SGD(tfdist.optimizers.make_learning_rate(0.1, warmup_steps=2)),
}


def trained(strategy, batch_norm, optimizer=keras.optimizers.AdamW):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.build(f"cnn(filters=(4,), batch_norm='{batch_norm}')", (6, 6, 1), 3)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(model, optimizer=optimizer(), loss=loss, metrics=["accuracy"])
    trainer.fit((X, Y), batch_size=8, steps=3)
    return trainer


def test_keras_alone_reads_it(mirrored2, tmp_path):
    np.save(tmp_path / "x.npy", X)
    expected = {}
    for batch_norm, optimizer in OWN_OPTIMIZERS.items():
        trainer = trained(mirrored2, batch_norm, optimizer)
        trainer.save(str(tmp_path / f"{batch_norm}.keras"))
        assert trainer.model.compiled
        expected[batch_norm] = np.asarray(trainer.model(X, training=False))
    command = [sys.executable, "-P", "-c", READER, *expected]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    for batch_norm, outputs in expected.items():
        np.testing.assert_allclose(np.load(tmp_path / f"{batch_norm}.npy"), outputs, rtol=1e-5, atol=1e-6)


def test_local_statistics_are_averaged_before(mirrored2, tmp_path):
    trainer = trained(mirrored2, "local")
    mean = next(v for v in trainer.model.variables if v.path.endswith("moving_mean"))

    def drift():
        mean.assign(mean + 1000.0 * keras.ops.cast(mirrored2.collectives.rank, "float32"))

    before = np.asarray(mirrored2.local(mean.value)[0])
    mirrored2.run(drift)
    trainer.save(str(tmp_path / "model.keras"))
    saved = keras.saving.load_model(tmp_path / "model.keras")
    found = next(v for v in saved.variables if v.path.endswith("moving_mean"))
    np.testing.assert_allclose(found, before + 500.0, rtol=1e-6)


def test_the_optimizer_goes_with_it(single, tmp_path):
    trainer = trained(single, "local")
    trainer.save(str(tmp_path / "model.keras"))
    saved = keras.saving.load_model(tmp_path / "model.keras")
    for a, b in zip(saved.optimizer.variables, trainer.model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(saved.optimizer.iterations) == 3


def test_only_the_chief_writes(single, tmp_path, monkeypatch):
    trainer = trained(single, "local")
    monkeypatch.setattr(type(single), "is_chief", False)
    trainer.save(str(tmp_path / "model.keras"))
    assert not list(tmp_path.iterdir())
