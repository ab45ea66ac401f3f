"""Exchanges of fragments with a delay, against NumPy in float64 and with a thread of their own against none."""

import threading

import numpy as np
import pytest

import tfdist
from tests.selection import quick
from tests.synchronization.linear_regression import (
    NESTEROV,
    RATE,
    REPLICAS,
    Regression,
    X,
    Y,
    assert_close,
    fit,
    global_weights,
    momentum_of,
    of_replicas,
    trained,
    trainer_of,
)
from tfdist.errors import InputError

OF_NESTEROV = (0.7, momentum_of(0.9))
PLAIN = "sgd(learning_rate=1.0)"


def in_numpy(weights, batches, *, period, fragments=((0, 1),), offsets=None, delay=0, mixing=None, outer=(1.0, 0.0)):
    """Returns the mean of the replicas' weights after all batches; mixing None: replicas keep their progress.

    Args:
      weights: kernel and bias.
      batches: numbers of the examples of each step.
      period: steps between two exchanges of a fragment.
      fragments: indices of the weights in each.
      offsets: steps from the exchange of the first fragment to that of each; None: equal parts of the period.
      delay: steps after which what was sent is used, or a number for each fragment.
      mixing: share of a replica's own weights.
      outer: rate and Nesterov momentum.
    """
    whole, (rate, momentum) = [w.copy() for w in weights], outer
    buffer = [np.zeros_like(w) for w in weights]
    local = [[w.copy() for w in weights] for _ in range(REPLICAS)]
    rows = np.zeros((len(fragments), REPLICAS))
    offsets = offsets or [period * p // len(fragments) for p in range(len(fragments))]
    delays = np.broadcast_to(delay, len(fragments))
    sent = {}

    def use(step):
        members, new, old = sent.pop(step, ((), None, None))
        for own, then in zip(local, old or local, strict=True):
            for i in members:
                own[i] = new[i] + own[i] - then[i] if mixing is None else mixing * own[i] + (1 - mixing) * new[i]

    for step, numbers in enumerate(batches, 1):
        for r, mine in enumerate(np.split(numbers, [4, 7])):
            kernel, bias = local[r]
            error = 2 / Y[mine].size * (X[mine] @ kernel + bias - Y[mine])
            local[r] = [kernel - RATE * X[mine].T @ error, bias - RATE * error.sum(0)]
            rows[:, r] += len(mine)
        use(step)
        for p, members in enumerate(fragments):
            first = offsets[p] or period
            if step >= first and (step - first) % period == 0:
                old = [[w.copy() for w in own] for own in local]
                for i in members:
                    change = sum(n * (whole[i] - own[i]) for n, own in zip(rows[p], old, strict=True)) / rows[p].sum()
                    buffer[i] = momentum * buffer[i] + change
                    whole[i] = whole[i] - rate * (change + momentum * buffer[i] if momentum else change)
                rows[p] = 0
                sent[step + delays[p]] = (members, [w.copy() for w in whole], old)
        use(step)
    found = [None, None]
    for p, members in enumerate(fragments):
        shares = rows[p] / rows[p].sum() if rows[p].sum() else np.full(REPLICAS, 1 / REPLICAS)
        for i in members:
            found[i] = sum(n * own[i] for n, own in zip(shares, local, strict=True))
    return found


def assert_equals_numpy(strategy, sync, reference, steps):
    run = Regression(strategy, sync)
    weights = [np.asarray(w) for w in run.trainer.model.get_weights()]
    run.fit(steps, schedule=tfdist.Schedule())
    assert_close(global_weights(run.trainer), in_numpy(weights, run.seen.steps, **reference))


ORDER = ((0,), (1,))  # the kernel is larger than the bias


@pytest.mark.parametrize(
    ("sync", "reference"),
    [
        ("local_sgd(period=3, delay=2)", {"period": 3, "delay": 2}),
        ("local_sgd(period=1, overlap=True)", {"period": 1, "delay": 1}),
        (f"diloco(period=5, fragments=2, outer='{PLAIN}')", {"period": 5, "fragments": ORDER, "mixing": 0}),
        (
            f"diloco(period=4, fragments=2, delay=2, mixing=0.3, outer='{NESTEROV}')",
            {"period": 4, "fragments": ORDER, "delay": 2, "mixing": 0.3, "outer": OF_NESTEROV},
        ),
        (
            f"diloco(period=4, overlap=True, outer='{NESTEROV}')",
            {"period": 4, "delay": 4, "mixing": 0.5, "outer": OF_NESTEROV},
        ),
        (  # in proportion to the 10 numbers of the kernel and the 2 of the bias
            f"diloco(period=8, fragments=2, overlap=True, outer='{NESTEROV}')",
            {"period": 8, "fragments": ORDER, "offsets": (0, 6), "delay": (6, 2), "mixing": 0.5, "outer": OF_NESTEROV},
        ),
        (f"diloco(period=3, mixing=0.25, outer='{PLAIN}')", {"period": 3, "mixing": 0.25}),
    ],
)
@pytest.mark.parametrize("steps", quick([8, 13], 13))
def test_numpy(sync, reference, steps, mirrored3):
    assert_equals_numpy(mirrored3, sync, reference, steps)


@pytest.mark.parametrize("steps", [6, 7])  # an exchange at the end, and a step after it
@pytest.mark.parametrize(
    ("sync", "reference"),
    [("local_sgd(period=3)", {}), (f"diloco(period=3, outer='{NESTEROV}')", {"outer": OF_NESTEROV})],
)
def test_numpy_without_delays(sync, reference, steps, mirrored3):
    assert_equals_numpy(mirrored3, sync, {"period": 3, **reference}, steps)


@pytest.mark.parametrize("compression", quick(["none", "int8"], "int8"))
@pytest.mark.parametrize(
    ("overlapping", "waiting"),
    [
        ("local_sgd(period=3, overlap=True)", "local_sgd(period=3, delay=3)"),
        ("diloco(period=6, fragments=2, overlap=True, delay=2)", "diloco(period=6, fragments=2, delay=2)"),
    ],
)
def test_overlap_changes_no_bit(overlapping, waiting, compression, mirrored3):
    options = {"steps": 14, "compression": compression, "compression_min_bytes": 0}
    one, records = trained(mirrored3, overlapping, **options)
    other, of_other = trained(mirrored3, waiting, **options)
    for found, wanted in zip(one.model.trainable_variables, other.model.trainable_variables, strict=True):
        np.testing.assert_array_equal(of_replicas(mirrored3, found), of_replicas(mirrored3, wanted))
    divergence = [record.get("replica_divergence") for record in records.records]
    assert divergence == [record.get("replica_divergence") for record in of_other.records]
    assert divergence[-1] > 0
    assert "tfdist-exchange" not in [thread.name for thread in threading.enumerate()]


def test_evaluations_and_checkpoints_change_nothing(mirrored3, tmp_path):
    sync = "diloco(period=6, fragments=2, overlap=True)"
    plain, _ = trained(mirrored3, sync, steps=14)
    trainer = trainer_of(mirrored3, sync)
    for steps in (5, 9):  # the first call of fit ends with a fragment on its way
        fit(
            trainer,
            steps,
            validation_data=(X, Y),
            schedule=tfdist.Schedule(eval_every=2),
            checks=tfdist.Checks(check_sync_every=4),
            checkpoints=tfdist.Checkpoints(directory=str(tmp_path), every=3),
        )
    for one, other in zip(trainer.model.trainable_variables, plain.model.trainable_variables, strict=True):
        np.testing.assert_array_equal(of_replicas(mirrored3, one), of_replicas(mirrored3, other))


def test_an_error_of_an_exchange_ends_the_run(mirrored3, monkeypatch):
    trainer = trainer_of(mirrored3, "local_sgd(period=3, overlap=True)")
    trainer.build((X, Y))
    exchanges, compiled = trainer.program.synchronizer, trainer.program.synchronizer._compiled_for

    def failing(function, *args, **options):
        found = compiled(function, *args, **options)
        is_second = function.__name__ == "exchange" and trainer.step >= 3
        return (lambda message: 1 / 0) if is_second else found

    monkeypatch.setattr(exchanges, "_compiled_for", failing)
    with pytest.raises(ZeroDivisionError):
        fit(trainer, 20)
    assert trainer.step <= 9  # sent at step 6, to be used at step 9


def test_more_fragments_than_variables_are_refused(mirrored3):
    with pytest.raises(InputError, match="Received: 3 fragments of 2 variables"):
        trainer_of(mirrored3, "diloco(fragments=3)").build((X, Y))
