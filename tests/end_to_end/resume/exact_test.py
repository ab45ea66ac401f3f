"""A resumed run is bitwise equal to an uninterrupted one, with the same strategy and number of replicas."""

import functools
import logging
import pathlib
import re
import shutil

import keras
import numpy as np
import pytest

import tfdist
from tests.selection import quick
from tfdist import models
from tfdist.checkpoint.format import Checkpoint, CheckpointError, TensorBlock, complete_checkpoints, write_checkpoint
from tfdist.coordination import LocalGroup
from tfdist.data import StreamPosition
from tfdist.data.batch_schedule import BatchSchedule
from tfdist.errors import InputError
from tfdist.gradients import LossScale
from tfdist.trainer.program import Program

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.standard_normal((40, 6, 6, 1)).astype("float32")
LABELS = RANDOM.integers(0, 3, 40)
STEPS, SAVED_AT = 12, 7  # in the second epoch of 5 steps
FEEDBACK = {"compression": "topk(ratio=0.1)", "compression_min_bytes": 0}
OPTIONS = {
    "plain": {},
    "error_feedback": FEEDBACK,
    "powersgd": {"compression": "powersgd(rank=2)", "compression_min_bytes": 0},
    "randomk": {"compression": "randomk(ratio=0.2)", "compression_min_bytes": 0},
    "dgc": {"compression": "dgc(ratio=0.1)", "compression_min_bytes": 0},
    "loss_scale_and_average": {"loss_scale": LossScale(initial=2.0**20, growth_interval=3), "ema": 0.9},
    "accumulation": {"accumulate_steps": 2},
    # Saved with a message on its way:
    "local_sgd_overlap": {"sync": "local_sgd(period=3, overlap=True)", **FEEDBACK},
    "diloco_fragments": {"sync": "diloco(period=6, fragments=2, overlap=True)", **FEEDBACK},
    "fedavg": {"sync": "fedavg(clients=5, fraction=0.6, outer='adam(learning_rate=0.01)')", **FEEDBACK},
    "easgd": {"sync": "easgd(period=3)", **FEEDBACK},
}


def model() -> keras.Model:
    """Returns a model with statistics of each replica's rows, and random numbers."""
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(3),
        ]
    )


def small_model() -> keras.Model:
    """Returns a model that is compiled in a fraction of the time, for tests of when a run is saved rather than what."""
    return keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])


def make_trainer(strategy, optimizer=None, make=model, **options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        trainer = tfdist.Trainer(
            make(),
            optimizer=optimizer()
            if optimizer
            else keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.01, 20)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2_accuracy")],
            seed=5,
            **options,
        )
    trainer.build(tfdist.data.ArraySource((IMAGES, LABELS)))
    return trainer


def fit(trainer, directory, steps=STEPS, every=SAVED_AT, **more):
    checkpoints = tfdist.Checkpoints(directory=str(directory), every=str(every), keep=10)
    return trainer.fit(
        (IMAGES, LABELS),
        batch_size=8,
        steps=steps,
        schedule=tfdist.Schedule(log_every=4, steps_per_call=3),
        checkpoints=checkpoints,
        **more,
    )


def tensors(path: pathlib.Path) -> dict[str, bytes]:
    saved = Checkpoint.open(path)
    return {name: saved.read(name).tobytes() for name in saved.tensors}


@pytest.fixture(scope="module")
def uninterrupted(mirrored2, tmp_path_factory):
    """Makes an uninterrupted run with given options, once; returns its checkpoints and its history."""

    @functools.cache
    def made(name):
        directory = tmp_path_factory.mktemp(name)
        return directory, fit(make_trainer(mirrored2, **OPTIONS[name]), directory)

    return made


FULL = ("plain", "randomk", "accumulation", "powersgd")


@pytest.mark.parametrize("name", [pytest.param(k, marks=[pytest.mark.full] * (k in FULL)) for k in OPTIONS])
def test_every_bit(name, uninterrupted, mirrored2, tmp_path, caplog):
    caplog.set_level(logging.INFO, "tfdist")
    directory, whole = uninterrupted(name)
    averages = [tensor for tensor in tensors(complete_checkpoints(directory)[0]) if "average" in tensor]
    assert bool(averages) == ("ema" in OPTIONS[name])
    shutil.copytree(directory / "step-000000007", tmp_path / "step-000000007")  # as if stopped there
    trainer = make_trainer(mirrored2, **OPTIONS[name])
    assert trainer.resume(tmp_path) == SAVED_AT
    rest = fit(trainer, tmp_path)
    end, wanted = complete_checkpoints(tmp_path)[0], complete_checkpoints(directory)[0]
    assert tensors(end) == tensors(wanted)
    assert Checkpoint.open(end).values == Checkpoint.open(wanted).values
    count = len(rest.records)
    numbers = ("kind", "step", "loss", "accuracy", "top2_accuracy", "learning_rate", "skipped_steps", "loss_scale")
    shown = [[{k: r[k] for k in numbers if k in r} for r in h.records[-count:]] for h in (rest, whole)]
    assert shown[0] == shown[1]
    assert count == 2
    assert "compression residuals" not in caplog.text, "the number of replicas is unchanged"


PREFIXES = ("model/", "optimizer/", "statistics/", "state/", "replica_state/")


@pytest.mark.parametrize("prefix", quick(PREFIXES, "model/", "statistics/", "replica_state/"))
def test_what_is_not_restored_shows(prefix, uninterrupted, mirrored2, tmp_path, monkeypatch):
    """The test above would detect any state that is not restored."""
    name = "dgc" if prefix == "state/" else "error_feedback"
    directory, _ = uninterrupted(name)
    trainer = make_trainer(mirrored2, **OPTIONS[name])
    state = trainer.program.run_variables(trainer.train_state.callbacks)
    kept = {name: held for name, held in state._variables.items() if not name.startswith(prefix)}
    monkeypatch.setattr(state, "_match_names", lambda *_: {name: name for name in kept})
    state._variables = kept
    states = state._states
    monkeypatch.setattr(state, "_states", lambda c, p: {} if p == prefix else states(c, p))
    monkeypatch.setattr(Program, "run_variables", lambda *_: state)
    trainer.resume(directory / "step-000000007")
    monkeypatch.undo()
    fit(trainer, tmp_path)
    assert tensors(tmp_path / "step-000000012") != tensors(directory / "step-000000012")


def test_another_number_of_replicas(mirrored2, mirrored4, tmp_path, caplog):
    """Moving statistics are replaced by their mean; the sum of error feedback is preserved, and the run says so."""
    caplog.set_level(logging.INFO, "tfdist")
    fit(make_trainer(mirrored4, **FEEDBACK), tmp_path, steps=SAVED_AT)
    saved = Checkpoint.open(complete_checkpoints(tmp_path)[0])
    trainer = make_trainer(mirrored2, **FEEDBACK)
    trainer.resume(tmp_path)
    trainer.program.steps.loop(8)  # creates the state of its compression
    [said] = [message for message in caplog.messages if "compression residuals" in message]
    words = "2 replicas resume a run with 4: .* replica r also gets those of r [+] 2, r [+] 4, ..."
    assert re.fullmatch(words, said)
    errors = {name: kept for name, kept in trainer.state.items() if kept.per_replica}
    assert errors
    for name, kept in errors.items():
        was = saved.read(f"replica_state/{name}")
        np.testing.assert_array_equal(kept.values, [was[0] + was[2], was[1] + was[3]])
        assert np.any(was)
    [variable] = [v for v in trainer.model.variables if v.path.endswith("moving_mean")]
    was = saved.read(f"statistics/{variable.path}")
    assert not np.array_equal(was[0], was[1])
    for own in mirrored2.local(variable.value):
        np.testing.assert_allclose(own, was.mean(0), rtol=1e-6)


def test_more_replicas_begin_with_nothing_unsent_and_say_so(single, mirrored2, tmp_path, caplog):
    fit(make_trainer(single, **FEEDBACK), tmp_path, steps=SAVED_AT)
    trainer = make_trainer(mirrored2, **FEEDBACK)
    trainer.resume(tmp_path)
    with caplog.at_level(logging.INFO, "tfdist"):
        trainer.program.steps.loop(8)
    [said] = [message for message in caplog.messages if "compression residuals" in message]
    assert re.fullmatch("2 replicas resume a run with 1: .*; replicas from 1 on start with zeros.", said)
    for kept in trainer.state.values():
        if kept.per_replica:
            assert not np.any(kept.values[1])


def test_layers_that_keras_numbers_otherwise_are_the_same(single, tmp_path):
    fit(make_trainer(single), tmp_path, steps=SAVED_AT)
    saved = tensors(complete_checkpoints(tmp_path)[0])
    with single.scope():
        keras.layers.Dense(1), keras.optimizers.AdamW()

    def later():
        keras.layers.Dense(1)
        return model()

    trainer = make_trainer(single, make=later)
    assert trainer.resume(tmp_path) == SAVED_AT
    paths = [v.path for v in trainer.model.trainable_variables]
    assert f"model/{paths[-1]}" not in saved
    [bias] = [values for name, values in saved.items() if name.startswith("model/") and name.endswith("dense_1/bias")]
    np.testing.assert_array_equal(trainer.model.trainable_variables[-1], np.frombuffer(bias, "float32"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"make": lambda: models.build("mlp(hidden=(8,))", (6, 6, 1), 3)},
            r"conv2d/kernel is float32\[3, 3, 1, 4\] in the checkpoint and missing in the model.*and \d+ more",
        ),
        ({"optimizer": keras.optimizers.SGD}, "optimizer/"),
    ],
    ids=["model", "optimizer"],
)
def test_another_model_or_optimizer_is_refused_and_nothing_is_changed(options, message, after_a_step, single):
    trainer = make_trainer(single, **options)
    before = [np.array(v) for v in trainer.model.variables]
    with pytest.raises(InputError, match=message):
        trainer.resume(after_a_step[1])
    for value, variable in zip(before, trainer.model.variables, strict=True):
        np.testing.assert_array_equal(value, variable)


def test_where_all_are_damaged_no_run_begins_anew(single, tmp_path):
    fit(make_trainer(single), tmp_path)
    for path in complete_checkpoints(tmp_path):
        (path / "shard-00000.safetensors").write_bytes(b"")
    trainer = make_trainer(single)
    with pytest.raises(CheckpointError, match="2 damaged"):
        trainer.resume(tmp_path)
    for directory in (tmp_path, tmp_path.parent):  # the second call only finds what the first has renamed
        if directory == tmp_path.parent:
            (tmp_path.parent / "checkpoints").symlink_to(tmp_path)
        with pytest.raises(
            CheckpointError, match=r"all checkpoints are damaged; the newest is .*/step-000000012.damaged"
        ):
            trainer.resume(directory)
    with pytest.raises(CheckpointError, match=r"all checkpoints are damaged; the newest is .*/step-000000012.damaged"):
        trainer.resume(tmp_path / "new", commits=tmp_path)


@pytest.fixture(scope="module")
def after_a_step(single, tmp_path_factory) -> tuple[tfdist.Trainer, pathlib.Path]:
    """A trainer, and the directory with the checkpoint of its first step."""
    directory, trainer = tmp_path_factory.mktemp("after_a_step"), make_trainer(single)
    fit(trainer, directory, steps=1, every=1)
    return trainer, directory


@pytest.mark.parametrize(
    "values",
    [
        {"progress": 3},
        {"batch_schedule": {"step": 1}},
        {"batch_schedule": {**BatchSchedule.initial(StreamPosition(4), 0, 8, 4, 1).to_json(), "begun_at": None}},
        {"exchanges": None},
        {"order": None},
        *({"compression": wrong} for wrong in ([1], {"kernel": 3}, {"kernel": "topk(ratio"})),
    ],
)
def test_values_of_another_kind_are_damage(values, after_a_step, tmp_path):
    """An untrusted checkpoint may have invalid values with valid hashes; nothing of it is restored."""
    trainer, directory = after_a_step
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    own = Checkpoint.open(complete_checkpoints(tmp_path)[0])
    parts = [TensorBlock.full(name, own.read(name)) for name in own.tensors]
    write_checkpoint(LocalGroup(), tmp_path, parts, step=2, seed=5, flags={}, values=own.values | values, keep=2)
    assert trainer.resume(tmp_path) == 1
    assert (tmp_path / "step-000000002.damaged").exists()


def test_compression_of_another_kind_begins_anew(single, tmp_path, caplog):
    fit(make_trainer(single, **OPTIONS["powersgd"]), tmp_path, steps=1, every=1)
    trainer = make_trainer(single, compression="powersgd(rank=1)", compression_min_bytes=0)
    trainer.resume(tmp_path)
    with caplog.at_level(logging.WARNING):
        fit(trainer, tmp_path, steps=2)
    assert "is reset: its dtype and shape were" in caplog.text
