"""Schedules in training: the momentum of one-cycle, plateaus, and runs that resume in the middle of a schedule."""

import functools
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.end_to_end.resume.exact_test import IMAGES, LABELS, tensors
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints
from tfdist.optimizers import LARS, MomentumCorrectedSGD, WarmupAndDecay

STEPS, SAVED_AT = 30, 14
OTHERS = (IMAGES[::-1], np.roll(LABELS, 7))  # other labels than those of training, so that their loss grows
ONE_CYCLE = {"decay": "one_cycle(pct_start=0.4)", "total_steps": STEPS}


def plateau(monitor="val_loss", **given):
    return tfdist.ReduceLROnPlateau(monitor, **{"factor": 0.5, "patience": 1, "cooldown": 1} | given)


def small_model():
    """A model without random layers and statistics of rows, which equals itself on any number of replicas."""
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(4),
        ]
    )


def make(strategy, optimizer, **options):
    keras.utils.clear_session(free_memory=False)  # names of layers are those of checkpoints
    keras.utils.set_random_seed(1)
    with strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return tfdist.Trainer(small_model(), optimizer=optimizer(), loss=loss, **options)


def fit(trainer, steps=STEPS, eval_every=3, callbacks=(), directory=None, every="7"):
    checkpoints = tfdist.Checkpoints(directory=str(directory), every=every, keep=20) if directory else None
    return trainer.fit(
        (IMAGES, LABELS),
        batch_size=8,
        steps=steps,
        verbose=0,
        validation_data=OTHERS,
        schedule=tfdist.Schedule(eval_every=eval_every, steps_per_call=4, log_every=1),
        callbacks=callbacks,
        checkpoints=checkpoints,
    )


def recorded(history, kind="train", name="learning_rate"):
    return {record["step"]: record[name] for record in history.records if record["kind"] == kind}


def weights(trainer):
    return [np.asarray(w) for w in trainer.model.get_weights()]


OPTIMIZERS = {
    "sgd": lambda rate: keras.optimizers.SGD(rate, momentum=0.5),
    "nesterov": lambda rate: keras.optimizers.SGD(rate, momentum=0.5, nesterov=True),
    "corrected": lambda rate: MomentumCorrectedSGD(rate, momentum=0.5),
    "rmsprop": lambda rate: keras.optimizers.RMSprop(rate, momentum=0.5),
    "lars": lambda rate: LARS(rate, momentum=0.5),
    "adamw": lambda rate: keras.optimizers.AdamW(rate),
    "nadam": lambda rate: keras.optimizers.Nadam(rate),
    "lamb": lambda rate: keras.optimizers.Lamb(rate),
    "muon": lambda rate: keras.optimizers.Muon(rate, momentum=0.5),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n != "adamw")) for n in OPTIMIZERS])
def test_one_cycle_changes_the_momentum_of_each_update(name, mirrored2, float64):
    """Compared with the same optimizer, whose number is set before each update of a plain loop."""
    rate = WarmupAndDecay(0.05, **ONE_CYCLE)
    trainer = make(mirrored2, lambda: OPTIMIZERS[name](rate))
    trainer.fit((IMAGES, LABELS), batch_size=40, steps=STEPS, verbose=0)
    attribute = "beta_1" if name in ("adamw", "nadam", "lamb") else "momentum"
    keras.utils.set_random_seed(1)
    model, optimizer = small_model(), OPTIMIZERS[name](rate)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            value = loss(LABELS, model(IMAGES.astype("float64")))
        setattr(optimizer, attribute, np.float64(rate.momentum(step)))  # a Python float would be rounded to float32
        optimizer.apply(tape.gradient(value, [v.value for v in model.trainable_variables]), model.trainable_variables)
    for ours, theirs in zip(weights(trainer), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-11)
    assert getattr(trainer.model.optimizer, attribute) in (0.5, 0.9), "outside of updates, it is what it was"


@pytest.mark.parametrize(
    "strategy", [*(pytest.param(name, marks=pytest.mark.full) for name in ("single", "mirrored2")), "mesh2x2"]
)
def test_the_rate_falls_at_plateaus_as_in_keras(strategy, request, caplog):
    """The rates follow from the results of the evaluations by the rule of Keras's own callback."""
    caplog.set_level("INFO")
    trainer = make(request.getfixturevalue(strategy), lambda: keras.optimizers.Adam(0.02))
    history = fit(trainer, callbacks=[plateau()])
    losses, rates = recorded(history, "eval", "loss"), recorded(history)
    reference = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, cooldown=1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
    reference.set_model(model)
    reference.on_train_begin()
    expected = {}
    for step in range(1, STEPS + 1):
        expected[step] = float(model.optimizer.learning_rate)
        if step in losses:
            reference.on_epoch_end(step, {"val_loss": losses[step]})
    assert rates == expected
    assert min(rates.values()) < 0.01 < max(rates.values()), "it falls, more than once"
    falls = [record.getMessage() for record in caplog.records if "Reducing the learning rate" in record.getMessage()]
    last = float(keras.ops.convert_to_numpy(trainer.model.optimizer.learning_rate))
    assert len(falls) == len({*rates.values(), last}) - 1
    first = next(step for step, rate in rates.items() if rate < 0.015) - 1
    assert falls[0] == (
        f"Reducing the learning rate from 0.02 to 0.01 at step {first}: val_loss has not improved for 1 evaluation."
    )


@pytest.mark.full
def test_it_looks_at_the_evaluations_of_keras_s_own_fit():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer=keras.optimizers.SGD(1e-6), loss="mse")
    x, y = np.ones((4, 1)), np.zeros((4, 1))
    callbacks = [plateau(min_delta=0.1), tfdist.EarlyStopping("val_loss", patience=4, min_delta=0.1)]
    found = model.fit(x, y, validation_data=(x, y), epochs=9, callbacks=callbacks, verbose=0)
    assert len(found.epoch) == 5 and float(model.optimizer.learning_rate) < 1e-6


def test_epochs_without_an_evaluation_are_none_to_look_at(single, recwarn):
    trainer = make(single, lambda: keras.optimizers.SGD(0.02))
    fit(trainer, eval_every=20, callbacks=[plateau(), tfdist.EarlyStopping("val_loss")])
    assert not [str(each.message) for each in recwarn if "which is not available" in str(each.message)]


def test_plateaus_of_a_metric_of_training_are_counted_in_epochs(single):
    trainer = make(single, lambda: keras.optimizers.SGD(0.02))
    rates = recorded(fit(trainer, callbacks=[plateau("loss", min_delta=100.0, cooldown=0)]))
    assert [rates[step] for step in (5, 10, 11, 16, 21)] == pytest.approx([0.02, 0.02, 0.01, 0.005, 0.0025])


def schedules():
    return {
        "one_cycle": (WarmupAndDecay(0.02, **ONE_CYCLE), ()),
        "cosine_restarts": (WarmupAndDecay(0.02, decay="cosine_restarts(first=4)"), ()),
        "exponential": (WarmupAndDecay(0.02, warmup_steps=5, decay="exponential", total_steps=STEPS), ()),
        "polynomial": (WarmupAndDecay(0.02, decay="polynomial(power=2)", total_steps=STEPS), ()),
        "plateau": (0.02, [plateau()]),
        "plateau of an epoch": (0.02, [plateau("loss", min_delta=100.0)]),
    }


@functools.cache
def whole_run(name, strategy, directory):
    rate, callbacks = schedules()[name]
    trainer = make(strategy, lambda: keras.optimizers.Adam(rate))
    return recorded(fit(trainer, callbacks=callbacks, directory=directory))


@pytest.mark.parametrize(
    ("name", "stopped_at"),  # between evaluations, and at one
    [
        pytest.param(name, step, marks=[pytest.mark.full] * ((name, step) not in (("one_cycle", 14), ("plateau", 21))))
        for name in schedules()
        for step in (14, 21)
    ],
)
def test_a_run_resumes_in_the_middle_of_its_schedule(name, stopped_at, mirrored2, tmp_path_factory, tmp_path):
    directory = tmp_path_factory.getbasetemp() / name.replace(" ", "-")
    rates = whole_run(name, mirrored2, directory)
    shutil.copytree(directory / f"step-{stopped_at:09}", tmp_path / f"step-{stopped_at:09}")
    rate, callbacks = schedules()[name]
    trainer = make(mirrored2, lambda: keras.optimizers.Adam(rate))
    trainer.build(tfdist.data.ArraySource((IMAGES, LABELS)))
    assert trainer.resume(tmp_path) == stopped_at
    rest = recorded(fit(trainer, callbacks=callbacks, directory=tmp_path))
    assert rest == {step: rates[step] for step in range(stopped_at + 1, STEPS + 1)}
    end, wanted = complete_checkpoints(tmp_path)[0], complete_checkpoints(directory)[0]
    assert tensors(end) == tensors(wanted)
    assert Checkpoint.open(end).values == Checkpoint.open(wanted).values


@pytest.mark.parametrize("name", ["single", "mirrored2"])
def test_a_function_is_called_for_the_learning_rate(name, request):
    trainer = make(request.getfixturevalue(name), lambda: keras.optimizers.SGD(lambda: 0.25))
    constant = make(request.getfixturevalue("single"), lambda: keras.optimizers.SGD(0.25))
    for each in (trainer, constant):
        history = each.fit((IMAGES, LABELS), batch_size=8, steps=3)
        assert history.last("train")["learning_rate"] == 0.25
    for found, wanted in zip(trainer.model.get_weights(), constant.model.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
