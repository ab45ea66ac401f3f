"""The moving average of the weights: against NumPy, over replicas, strategies and skipped steps, and what uses it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.end_to_end.resume.exact_test import IMAGES, LABELS, make_trainer
from tfdist.gradients import LossScale

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(24, 6)), RANDOM.normal(size=(24, 4))
MOMENTUM, STEPS = 0.9, 7
SCALE = LossScale(initial=1.9 * 2.0**127, cap=1.9 * 2.0**127, growth_interval=100)  # overflows with a loss above 1.06


def small(strategy, ema=MOMENTUM, **options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
        model = keras.Sequential(layers)
        return tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.1, 0.9), loss="mse", ema=ema, **options)


def weights(trainer):
    return [np.array(w) for w in trainer.model.get_weights()]


def averaged(trainer):
    with trainer.averaged_weights():
        return weights(trainer)


def reference(strategy, **options):
    """Returns the average of the weights of every step, in NumPy."""
    trainer = small(strategy, ema=0.0, **options)
    average = None
    for _ in range(STEPS):
        trainer.fit((X, Y), batch_size=8, steps=1)
        now = weights(trainer)
        average = (
            now if average is None else [MOMENTUM * a + (1 - MOMENTUM) * w for a, w in zip(average, now, strict=True)]
        )
    return average, now


@pytest.mark.parametrize("name", ["single", "mirrored2", "mesh2x2"])
@pytest.mark.parametrize("accumulate_steps", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_average_is_that_of_numpy(name, accumulate_steps, request, float64):
    average, last = reference(request.getfixturevalue("single"))
    trainer = small(request.getfixturevalue(name), accumulate_steps=accumulate_steps)
    trainer.fit((X, Y), batch_size=8, steps=STEPS)
    for found, wanted in zip([*averaged(trainer), *weights(trainer)], [*average, *last], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-14)


def test_replicas_have_the_same_average(mirrored4, float64):
    trainer = small(mirrored4)
    trainer.fit((X, Y), batch_size=8, steps=STEPS)
    slots = [v for v in trainer.model.optimizer.variables if "average" in v.path]
    assert len(slots) == 4
    for slot in slots:
        [first, *others] = [np.asarray(copy).tobytes() for copy in mirrored4.local(slot.value)]
        assert set(others) == {first}


def test_evaluations_and_the_saved_model_have_it_and_training_goes_on_as_before(mirrored2, tmp_path, float64):
    trainer = small(mirrored2)
    history = trainer.fit((X, Y), batch_size=8, steps=STEPS, validation_data=(X, Y))
    before = [w.tobytes() for w in weights(trainer)]
    average = averaged(trainer)
    trainer.save(str(tmp_path / "model.keras"))
    alone = keras.saving.load_model(tmp_path / "model.keras")
    for found, wanted in zip(alone.get_weights(), average, strict=True):
        np.testing.assert_array_equal(found, wanted)
    loss = float(np.mean((alone.predict(X, verbose=0) - Y) ** 2))
    assert trainer.evaluate((X, Y), batch_size=8)["loss"] == pytest.approx(loss, rel=1e-12)
    assert history.last("eval")["loss"] == pytest.approx(loss, rel=1e-12)
    assert [w.tobytes() for w in weights(trainer)] == before
    trainer.fit((X, Y), batch_size=8, steps=2)
    other = small(mirrored2)
    other.fit((X, Y), batch_size=8, steps=STEPS + 2)
    assert [w.tobytes() for w in weights(trainer)] == [w.tobytes() for w in weights(other)]


def test_the_weights_return_after_an_error(single):
    trainer = small(single)
    trainer.fit((X, Y), batch_size=8, steps=2)
    before = [w.tobytes() for w in weights(trainer)]
    with pytest.raises(RuntimeError), trainer.averaged_weights():
        assert [w.tobytes() for w in weights(trainer)] != before
        raise RuntimeError
    assert [w.tobytes() for w in weights(trainer)] == before


def test_before_the_first_step_there_is_no_average_to_use(single):
    trainer = small(single)
    trainer.build(tfdist.data.ArraySource((X, Y)))
    before = [w.tobytes() for w in weights(trainer)]
    assert [w.tobytes() for w in averaged(trainer)] == before


def test_a_skipped_step_does_not_change_it(single):
    """The first step overflows."""
    trainer = make_trainer(single, ema=0.5, loss_scale=SCALE)
    trainer.fit((IMAGES, LABELS), batch_size=8, steps=1)
    assert trainer.model.optimizer.iterations.numpy() == 0
    assert all(not np.any(v.numpy()) for v in trainer.model.optimizer.variables if "average" in v.path)
    trainer.fit((IMAGES, LABELS), batch_size=8, steps=30)
    assert trainer.model.optimizer.iterations.numpy() > 0
    assert all(np.all(np.isfinite(w)) for w in averaged(trainer))


@pytest.mark.parametrize("shard", [pytest.param("optimizer", marks=pytest.mark.full), "parameters"])
def test_a_sharded_average_is_that_of_one_device(shard, single, float64):
    def run(strategy):
        trainer = small(strategy)
        trainer.fit((X, Y), batch_size=8, steps=4)
        return trainer, trainer.evaluate((X, Y), batch_size=8)["loss"]

    mesh = tfdist.load_strategy(
        "mesh", mesh_shape="data:4", layout="batch:data", shard=shard, shard_min_elements=1, environment={}
    )
    (sharded, loss), (plain, wanted) = run(mesh), run(single)
    assert loss == pytest.approx(wanted, rel=1e-10)
    assert len(sharded.model.optimizer.variables) == len(plain.model.optimizer.variables)
    for found, value in zip([*averaged(sharded), *weights(sharded)], [*averaged(plain), *weights(plain)], strict=True):
        assert np.linalg.norm(found - value) <= 1e-9 * max(np.linalg.norm(value), 1e-3)


def test_traces_of_averages_do_not_accumulate(single):
    """Each evaluation uses the same compiled functions."""
    trainer = small(single)
    trainer.fit((X, Y), batch_size=8, steps=1)
    exchange = trainer.program.averaged_weights
    for _ in range(3):
        averaged(trainer)
    assert isinstance(exchange._compiled_swap, tf.types.experimental.PolymorphicFunction)
    assert exchange._compiled_swap.experimental_get_tracing_count() == 1


def test_predictions_are_those_of_the_average(mirrored2, float64):
    trainer = small(mirrored2)
    trainer.fit((X, Y), batch_size=8, steps=STEPS)
    found = trainer.predict(X)
    assert not np.allclose(found, trainer.model(X))
    kernel1, bias1, kernel2, bias2 = averaged(trainer)
    np.testing.assert_allclose(found, np.tanh(X @ kernel1 + bias1) @ kernel2 + bias2, rtol=1e-11, atol=1e-13)
