"""What a trainer rejects instead of being silently wrong, and short batches that leave a replica without rows."""

import keras
import numpy as np
import pytest

import tfdist
from tests.adding_loss import AddsLoss
from tfdist.errors import InputError
from tfdist.trainer.callbacks import Callbacks

X = np.random.default_rng(0).standard_normal((70, 4)).astype("float32")
DATA = (X, X[:, :1])


def build():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])


def make(strategy, optimizer="sgd", **options):
    with strategy.scope():
        return tfdist.Trainer(build(), optimizer=optimizer, loss="mse", **options)


def test_what_is_born_outside_the_scope(mirrored2):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    with pytest.raises(InputError, match="The optimizer must be created inside the strategy's scope"):
        make(mirrored2, keras.optimizers.SGD(schedule))
    model = build()
    with mirrored2.scope(), pytest.raises(InputError, match="The model must be created inside the strategy's scope"):
        tfdist.Trainer(model, optimizer="sgd", loss="mse")


@pytest.mark.parametrize("strategy", ["mirrored2", "mesh4x1"])
def test_metrics_may_be_created_outside_the_scope(strategy, request):
    strategy = request.getfixturevalue(strategy)
    counts = [kind(thresholds=1.0) for kind in (keras.metrics.TrueNegatives, keras.metrics.FalseNegatives)]
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")])
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="binary_crossentropy", metrics=counts)
    x, y = np.ones((24, 2), "float32"), np.arange(24) % 2
    logs = trainer.fit(x, y, batch_size=8, validation_data=(x, y), verbose=0).history
    for prefix in ("", "val_"):
        assert [logs[prefix + metric.name] for metric in counts] == [[12], [12]]


def test_changes_between_two_fits(single):
    trainer = make(single)
    trainer.fit(DATA, batch_size=16, steps=1)
    trainer.model.layers[0].trainable = False
    with pytest.raises(InputError, match="Create a new Trainer after changing `trainable`"):
        trainer.fit(DATA, batch_size=16, steps=1)
    trainer.model.layers[0].trainable = True
    trainer.fit(DATA, batch_size=16, steps=1)
    trainer.model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(InputError, match="compiled again"):
        trainer.fit(DATA, batch_size=16, steps=1)


@pytest.mark.parametrize(
    ("first", "then", "more"),
    [
        ({"batch_size": 16, "steps": 2}, {"batch_size": 16, "epochs": 1}, 5),
        ({"batch_size": 16, "steps": 2}, {"batch_size": 16, "steps": 3}, 3),
        ({"batch_size": 16, "epochs": 2}, {"batch_size": 16, "epochs": 1}, 5),  # into the fourth epoch
        ({"batch_size": 32, "epochs": 1}, {"batch_size": 8, "epochs": 1}, 6),
        ({"batch_size": 16, "epochs": 1}, {"batch_size": 16, "epochs": 1}, 4),
    ],
)
def test_epochs_more(single, first, then, more):
    """Two fits of one epoch make the same steps as one of two; from the middle of an epoch, one full epoch is added."""
    trainer = make(single)
    trainer.fit(DATA, **first)
    before = trainer.step
    trainer.fit(DATA, **then)
    assert trainer.step - before == more


def test_a_callback_that_would_restore_one_process_only(single, monkeypatch, tmp_path):
    monkeypatch.setattr(single, "cluster", tfdist.Cluster(rank=0, size=2))
    with pytest.raises(InputError, match="BackupAndRestore in a job of 2 processes"):
        Callbacks([keras.callbacks.BackupAndRestore(tmp_path)], build(), single)


def test_data_that_differs_between_processes(single, monkeypatch):
    agreed = {}
    monkeypatch.setattr(single.group, "agree", lambda name, value, *_, **options: agreed.update({name: value}))
    make(single).fit(DATA, batch_size=16, steps=1)
    assert agreed["data/size"]["number of examples"] == 70
    assert "float32" in agreed["data/form"]["form of an example"]


@pytest.mark.parametrize("kind", ["scalar loss", "scalar metric", "add_loss"])
def test_a_replica_without_a_row_in_the_last_batch(kind, single, mirrored2):
    """33 rows in batches of 16: the last batch has a row for the first replica only."""
    results = []
    for strategy in (single, mirrored2):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = build()
            if kind == "add_loss":
                model = keras.Sequential([keras.Input((4,)), AddsLoss(), keras.layers.Dense(1)])
            scalar = lambda y, p: keras.ops.mean(keras.ops.square(y - p))  # noqa: E731
            trainer = tfdist.Trainer(
                model,
                optimizer="sgd",
                loss=scalar if kind == "scalar loss" else "mse",
                metrics=[scalar] if kind == "scalar metric" else [],
            )
        results.append(trainer.evaluate((X[:33], DATA[1][:33]), batch_size=16))
    assert np.isfinite(list(results[1].values())).all()
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], rel=1e-5)
