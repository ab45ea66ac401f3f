"""Suspicious runs: each situation is said once by `Trainer.fit`, and an ordinary run says nothing."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist.optimizers import WarmupAndDecay
from tfdist.reporting import warn_once

X = np.random.default_rng(0).standard_normal((40, 4)).astype("float32")
DATA = (X, X[:, :1])


def make(strategy, learning_rate=0.01, **options):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        return tfdist.Trainer(model, optimizer=keras.optimizers.SGD(learning_rate), loss="mse", **options)


def resumed(strategy, path, learning_rate=0.01):
    trainer = make(strategy, learning_rate)
    trainer.build(DATA)
    trainer.resume(path)
    return trainer


def warned(warned_once, strategy, *, rate=None, data=DATA, batch_size=8, steps=4, compression="none", **options):
    with strategy.scope():
        learning_rate = WarmupAndDecay(0.01, **rate) if rate else 0.01
    make(strategy, learning_rate, compression=compression).fit(data, batch_size=batch_size, steps=steps, **options)
    return warned_once()


EVALUATED = {"validation_data": DATA}
ROWS = {
    "batch": ({"batch_size": 60}, ("A batch of 60 examples", "which has 40", "1.5 epochs")),
    "warmup": ({"rate": {"warmup_steps": 4}}, ("warmup takes 4 steps", "ends at step 4", "0.01")),
    "decay": ({"rate": {"decay": "step(every=4)"}}, ("is reduced every 4 steps", "never reduced")),
    "evaluation": (EVALUATED | {"schedule": tfdist.Schedule(eval_every=5)}, ("eval_every=5", "never evaluated")),
    "no data": ({"schedule": tfdist.Schedule(eval_every=2)}, ("eval_every=2 has no effect", "no data to evaluate")),
    "small gradients": (
        {"compression": "fp16"},
        ("compression=fp16 has no effect", "compression_min_bytes=65536"),
    ),
}
ORDINARY = {
    "batch": {"batch_size": 40},
    "warmup": {"rate": {"warmup_steps": 3}},
    "decay": {"rate": {"decay": "step(every=3)"}},
    "evaluation": {"schedule": tfdist.Schedule(eval_every=4), "validation_data": DATA},
}


@pytest.mark.parametrize("row", ROWS)
def test_a_suspicious_run_says_it_once(row, warned_once, single):
    options, words = ROWS[row]
    [text] = warned(warned_once, single, **options)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("row", ORDINARY)
def test_an_ordinary_run_says_nothing(row, warned_once, mirrored2):
    assert warned(warned_once, mirrored2, **ORDINARY[row]) == []


def test_a_repeated_fit_does_not_repeat_it(warned_once, single):
    trainer = make(single)
    for _ in range(2):
        trainer.fit(DATA, batch_size=60, steps=2)
    assert len([text for text in warned_once() if "A batch of 60" in text]) == 1


@pytest.mark.parametrize(
    ("sync", "words"),
    [
        ("easgd(period=5)", "is after step 5 and the run ends at step 4: the center"),
        ("local_sgd(period=5)", "is after step 5 and the run ends at step 4: evaluations and saved models"),
        (
            "post_local_sgd(warmup_steps=4, period=2)",
            "is after step 6 and the run ends at step 4: replicas never train locally",
        ),
        ("diloco(period=4)", ""),
        ("post_local_sgd(warmup_steps=2, period=2)", ""),
        ("fedavg(clients=5)", ""),
    ],
)
def test_an_exchange_that_never_comes(sync, words, warned_once, mirrored2):
    make(mirrored2, sync=sync).fit(DATA, batch_size=8, steps=4)
    texts = warned_once()
    assert [words in text for text in texts] == [True] * bool(words), texts


def test_one_replica_waits_for_no_exchange(warned_once, single):
    make(single, sync="local_sgd(period=5)").fit(DATA, batch_size=8, steps=4)
    assert not warned_once()


@pytest.mark.parametrize(("steps", "words"), [(4, "has reached its end"), (3, "is beyond its end, step 3")])
def test_nothing_is_left_to_train(warned_once, single, tmp_path, steps, words):
    saved = tfdist.Checkpoints(directory=str(tmp_path), every="4")
    make(single).fit(DATA, batch_size=8, steps=4, checkpoints=saved)
    resumed(single, tmp_path).fit(DATA, batch_size=8, steps=steps)
    [text] = warned_once()
    assert f"resumes at step 4 and {words}" in text and "more than 4 steps" in text


def test_an_interval_that_the_run_has_passed_before_it_resumed_is_not_said(warned_once, single, tmp_path):
    options = {"batch_size": 8, "validation_data": DATA, "schedule": tfdist.Schedule(eval_every=3)}
    make(single).fit(DATA, steps=4, checkpoints=tfdist.Checkpoints(directory=str(tmp_path), every="4"), **options)
    resumed(single, tmp_path).fit(DATA, steps=5, **options)
    assert warned_once() == []


@pytest.mark.parametrize("name", ["mirrored", "mesh"])
def test_a_strategy_with_one_device(name, warned_once):
    strategy = tfdist.load_strategy(name, devices=1, environment={})
    [text] = warned(warned_once, strategy)
    assert f"Strategy {name} has one device here" in text and "devices=N" in text


def test_a_loss_that_diverges_is_said_once_at_the_same_step_after_a_resume(caplog, warned_once, single, tmp_path):
    def fit(steps, resumes=False, **options):
        trainer = resumed(single, tmp_path, 4.0) if resumes else make(single, 4.0)  # the loss grows at each step
        trainer.fit(DATA, batch_size=40, steps=steps, schedule=tfdist.Schedule(steps_per_call=1), **options)
        found = [text for text in warned_once() if "loss diverges" in text]
        caplog.clear()
        warn_once.logged_situations.clear()
        return found

    [text] = fit(16)
    assert "more than 5 times the initial" in text and "Lower the learning rate" in text
    assert fit(8, checkpoints=tfdist.Checkpoints(directory=str(tmp_path), every="8")) == []
    assert fit(16, resumes=True) == [text]
