"""Elastic averaging against NumPy, in float64: `easgd`, and what is evaluated, saved and restored."""

import keras
import numpy as np
import pytest

import tfdist
from tests.selection import quick
from tests.synchronization.linear_regression import (
    BATCH,
    RATE,
    REPLICAS,
    ROWS,
    Regression,
    Schedule,
    X,
    Y,
    assert_close,
    momentum_of,
)
from tfdist.checkpoint.format import complete_checkpoints
from tfdist.errors import InputError


def in_numpy(run, period, alpha, steps, momentum=0.0, rows=ROWS):
    """Returns the center and the replicas' weights; with momentum, that of Nesterov."""
    center = run.start.copy()
    local = [center.copy() for _ in rows]
    velocity = [np.zeros_like(center) for _ in rows]
    for step in range(steps):
        for r in range(len(rows)):
            gradient = run.gradient(step, r, local[r], rows)
            velocity[r] = momentum * velocity[r] - RATE * gradient
            local[r] = local[r] + (momentum * velocity[r] - RATE * gradient if momentum else velocity[r])
        if (step + 1) % period == 0:
            differences = [w - center for w in local]
            local = [w - alpha * difference for w, difference in zip(local, differences, strict=True)]
            center = center + alpha * sum(differences)
    return center, local


def nesterov():
    return keras.optimizers.SGD(RATE, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("steps", quick([6, 8], 8))  # an exchange at the end, and steps after it
@pytest.mark.parametrize(
    ("sync", "alpha", "optimizer", "momentum"),
    [
        ("easgd(period=3)", 0.9 / REPLICAS, nesterov, 0.9),
        ("easgd(period=2, alpha=0.2)", 0.2, None, 0.0),
        pytest.param("easgd(period=3)", 0.9 / REPLICAS, None, 0.0, marks=pytest.mark.full),
    ],
)
def test_numpy(sync, alpha, optimizer, momentum, steps, mirrored3):
    run = Regression(mirrored3, sync, optimizer)
    run.fit(steps)
    period = tfdist.config.sync.parse_sync(sync).period
    center, local = in_numpy(run, period, alpha, steps, momentum_of(momentum))
    assert_close(run.evaluated(), center)
    assert_close(run.replicas(), local)  # evaluating has changed nothing


@pytest.mark.full
def test_the_divergence_is_that_before_the_exchange(mirrored3):
    run = Regression(mirrored3, "easgd(period=3)")
    history = run.fit(3)
    _, local = in_numpy(run, 4, 0, 3)  # without an exchange
    mean = np.mean(local, axis=0)
    spread = np.mean([np.linalg.norm(w - mean) ** 2 for w in local])
    assert history.records[-1]["replica_divergence"] == pytest.approx(np.sqrt(spread) / np.linalg.norm(mean), rel=1e-9)


def test_evaluation_prediction_and_export_use_the_center(mirrored3, tmp_path):
    run = Regression(mirrored3, "easgd(period=3)")
    run.fit(6)
    center, _ = in_numpy(run, 3, 0.3, 6)
    wanted = X @ center[:-1] + center[-1]
    assert run.trainer.predict(X, verbose=0) == pytest.approx(wanted, rel=1e-9)
    assert run.trainer.evaluate(X, Y)["loss"] == pytest.approx(np.mean((wanted - Y) ** 2), rel=1e-9)
    run.trainer.save(tmp_path / "model.keras")
    saved = keras.models.load_model(tmp_path / "model.keras")
    assert_close(np.vstack(saved.get_weights()), center)


def test_two_fits_are_one(mirrored3):
    one, two = (Regression(mirrored3, "easgd(period=3)") for _ in range(2))
    one.fit(10)
    two.fit(4)
    two.fit(6)
    np.testing.assert_array_equal(two.replicas(), one.replicas())
    np.testing.assert_array_equal(two.evaluated(), one.evaluated())


def test_another_number_of_replicas_begins_at_the_center(mirrored3, tmp_path):
    run = Regression(mirrored3, "easgd(period=3)")
    checkpoints = tfdist.Checkpoints(directory=str(tmp_path), every="4")
    run.fit(4, checkpoints=checkpoints)
    center = run.evaluated()
    two = Regression(tfdist.load_strategy("mirrored", devices=2), "easgd(period=3)")
    together = Regression(tfdist.load_strategy("mirrored", devices=2), "every_step")
    for other in (two, together):
        assert other.trainer.resume(complete_checkpoints(tmp_path)[0]) == 4
        for weights in (*other.replicas(), other.evaluated()):
            np.testing.assert_array_equal(weights, center)
    two.fit(3)
    assert two.evaluated().any()


def two_steps():
    """Returns an optimizer that changes nothing after two steps."""
    return keras.optimizers.SGD(Schedule(lambda step: RATE if step < 2 else 0.0))


@pytest.mark.parametrize(
    "compression", quick(["bf16", "int8", "topk(ratio=0.2)", "powersgd(rank=1)"], "topk(ratio=0.2)")
)
@pytest.mark.parametrize("steps", quick([2, 10], 10))
def test_what_compression_has_not_sent_is_not_lost(steps, compression, mirrored3):
    """With error feedback, exchanges keep the sum of center, replicas and alpha times what was not sent."""
    run = Regression(mirrored3, "easgd(period=2)", two_steps, compression=compression, compression_min_bytes=0)
    run.fit(steps)
    center, local = in_numpy(run, 3, 0, 2)  # before the first exchange
    wanted, found = (center + sum(local)).sum(), (run.evaluated() + sum(run.replicas())).sum()
    errors = [state.values for name, state in run.trainer.state.items() if name.endswith("/error")]
    if errors:
        unsent = sum(float(values.sum()) for values in errors)
        assert abs(0.3 * unsent) > 1e-5
        assert found - 0.3 * unsent == pytest.approx(wanted, rel=1e-7)  # numbers travel as float32
    else:
        assert found == pytest.approx(wanted, rel=0.02)
    assert_close(run.evaluated(), center + 0.3 * sum(w - center for w in local), 0.5 if steps == 2 else 1)


@pytest.mark.full
def test_one_replica(single, float64):
    run = Regression(single, "easgd(period=2)")
    run.fit(4)
    assert_close(run.evaluated(), in_numpy(run, 2, 0.9, 4, rows=[BATCH])[0])


def test_an_average_of_the_weights_is_refused(mirrored3):
    with pytest.raises(InputError, match="leave out ema or use another sync"):
        Regression(mirrored3, "easgd", ema=0.9)


def test_alpha_is_at_most_one_over_the_number_of_replicas(mirrored3):
    run = Regression(mirrored3, "easgd(alpha=0.5)")
    with pytest.raises(InputError, match="alpha must be at most 1/3 with 3 replicas. Received: 0.5"):
        run.fit(1)
