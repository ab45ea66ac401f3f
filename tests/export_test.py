"""Exporting the model of a run's checkpoint."""

import dataclasses
import errno
import itertools
import pkgutil
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

import tfdist
from tests.checkpoint.damaging import flip_last
from tests.evaluate_test import trained
from tfdist import export, train
from tfdist.checkpoint.format import Checkpoint
from tfdist.cli import trained_run
from tfdist.config.fields import field_names
from tfdist.config.train_config import TrainConfig
from tfdist.errors import CheckpointError, InputError
from tfdist.export import ExportConfig

IMAGES = np.random.default_rng(0).uniform(size=(3, 8, 8, 1)).astype("float32")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    return trained(tmp_path_factory, checkpoint_every="3")


@pytest.fixture(scope="module")
def wanted(run) -> np.ndarray:
    return np.asarray(keras.models.load_model(f"{run}/model.keras", compile=False)(IMAGES))


@pytest.mark.separable
@pytest.mark.smoke("export")
def test_keras_s_format(run, wanted, capsys):
    assert export.main(run, ExportConfig()) == 0
    path = f"{run}/export-000000005.keras"
    assert capsys.readouterr().out == f"{path}  step 5, from {run}/checkpoints/step-000000005\n"
    np.testing.assert_allclose(keras.models.load_model(path)(IMAGES), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ["served", "model-1.0"])
def test_a_saved_model(run, wanted, name, tmp_path):
    export.main(run, ExportConfig(format="saved_model", output=str(tmp_path / name)))
    served = tf.saved_model.load(str(tmp_path / name))
    np.testing.assert_allclose(served.serve(IMAGES), wanted, rtol=1e-5)


def test_safetensors(run, tmp_path):
    path = tmp_path / "new" / "weights.safetensors"
    export.main(run, ExportConfig(format="safetensors", output=str(path)))
    found = load_file(path)
    model = keras.models.load_model(f"{run}/model.keras", compile=False)
    assert found.keys() == {v.path for v in model.variables}
    for variable in model.variables:
        np.testing.assert_array_equal(found[variable.path], variable)


class Pair(keras.layers.Layer):
    """Two layers with the same name, whose variables have the same path."""

    def __init__(self):
        super().__init__(name="pair")
        self.one, self.other = (keras.layers.Dense(2, name="half", use_bias=False) for _ in range(2))

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)

    def call(self, inputs):
        return self.one(inputs) + self.other(inputs)


def test_variables_of_one_path_are_numbered_as_in_checkpoints(single, tmp_path):
    with single.scope():
        trainer = tfdist.Trainer(keras.Sequential([keras.Input((2,)), Pair()], name="own"), optimizer="sgd", loss="mse")
    saved = tfdist.Checkpoints(directory=str(tmp_path), every="1")
    trainer.fit((np.zeros((4, 2)), np.zeros((4, 2))), batch_size=4, steps=1, checkpoints=saved)
    export._write_safetensors(trainer, tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "step-000000001")
    assert sorted(found) == ["own/pair/half/kernel", "own/pair/half/kernel#2"]
    for name, values in found.items():
        np.testing.assert_array_equal(checkpoint.read(f"model/{name}"), values)


def test_one_checkpoint_of_a_run(run, tmp_path, capsys):
    """Exports that checkpoint, but not into its own directory."""
    older, output = f"{run}/checkpoints/step-000000003", str(tmp_path / "a.keras")
    export.main(older, ExportConfig())
    export.main(run, ExportConfig(checkpoint=older, output=output))
    shown = [f"{path}  step 3, from {older}" for path in (f"{run}/export-000000003.keras", output)]
    assert capsys.readouterr().out.splitlines() == shown


@pytest.mark.parametrize(
    ("kind", "name", "owner", "writer"),
    [
        ("keras", "a.keras", "tfdist.Trainer", "save"),
        ("saved_model", "a", "keras.Model", "export"),
        ("safetensors", "a.safetensors", "tfdist.checkpoint.format", "write_shard"),
    ],
)
def test_half_of_a_model_is_never_there(run, kind, name, owner, writer, tmp_path, monkeypatch):
    """As on a disk that becomes full during the write."""
    whole = getattr(pkgutil.resolve_name(owner), writer)

    def full(*args, **named):
        whole(*args, **named)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"{owner}.{writer}", full)
    with pytest.raises(
        InputError, match=rf"Received: {tmp_path}/out/{name} \(No space left on device\)\. Specify another"
    ):
        export.main(run, ExportConfig(format=kind, output=str(tmp_path / "out" / name)))
    assert not list((tmp_path / "out").iterdir())


def test_a_damaged_checkpoint_is_left_alone_and_left_out(run, tmp_path, capsys, caplog):
    last = tmp_path / "checkpoints"
    shutil.copytree(f"{run}/checkpoints", last)
    with open(last / "step-000000005" / "shard-00000.safetensors", "r+b") as file:
        file.truncate(100)
    export.main(str(tmp_path), ExportConfig())
    assert "step 3, from" in capsys.readouterr().out
    assert "step-000000005" in caplog.text
    assert sorted(path.name for path in last.glob("step-*")) == ["step-000000003", "step-000000005"]


@pytest.mark.parametrize("when", ["build", "resume_from"])
def test_a_run_that_trains_removes_what_was_there(run, when, tmp_path, monkeypatch, capsys):
    """While the model is built, and between listing the checkpoints and reading one."""
    home = tmp_path / "checkpoints"
    shutil.copytree(f"{run}/checkpoints/step-000000003", home / "step-000000003")
    action = getattr(tfdist.Trainer, when)

    def trains_on(*args, **named):
        if (home / "step-000000003").exists():
            shutil.copytree(f"{run}/checkpoints/step-000000005", home / "step-000000005")
            shutil.rmtree(home / "step-000000003")
        return action(*args, **named)

    monkeypatch.setattr(tfdist.Trainer, when, trains_on)
    assert export.main(str(tmp_path), ExportConfig()) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/export-000000005.keras  step 5, from {home}/step-000000005")


def test_one_that_is_damaged_is_not_tried_again_and_none_is_an_error(run, tmp_path, monkeypatch):
    home, tries, resume_from = tmp_path / "checkpoints", [], tfdist.Trainer.resume_from
    shutil.copytree(f"{run}/checkpoints/step-000000003", home / "step-000000003")
    [shard] = (home / "step-000000003").glob("shard-*")
    flip_last(shard)

    def counted(*args, **named):
        tries.append(args)
        return resume_from(*args, **named)

    monkeypatch.setattr(tfdist.Trainer, "resume_from", counted)
    with pytest.raises(CheckpointError, match="Received: 1 damaged"):
        export.main(str(tmp_path), ExportConfig())
    assert len(tries) == 1
    build = tfdist.Trainer.build
    monkeypatch.setattr(tfdist.Trainer, "build", lambda *args: (build(*args), shutil.rmtree(home)))
    with pytest.raises(InputError, match="which has neither checkpoints nor"):
        export.main(str(tmp_path), ExportConfig())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output": "model.h5"}, "must be a path ending in .keras"),
        ({"format": "saved_model", "output": "model.keras"}, "must be a path not ending in .keras or .safetensors"),
        ({"output": "FILE/model.keras"}, r"Received: .*/in-the-way/model.keras \(.*/in-the-way is not a directory\)"),
        ({"output": "FILE/new/model.keras"}, r"\(.*/in-the-way is not a directory\)"),
        ({"output": "FILE.keras"}, "does not exist yet"),
    ],
)
def test_where_it_cannot_be_written(run, given, message, tmp_path, monkeypatch):
    """Detected before the model is built and restored."""
    for name in ("in-the-way", "in-the-way.keras"):
        (tmp_path / name).write_text("")
    output = given["output"].replace("FILE", str(tmp_path / "in-the-way"))
    monkeypatch.setattr("tfdist.cli.run.open_session", lambda *_: pytest.fail("It was to be refused before."))
    with pytest.raises(InputError, match=message):
        export.main(run, ExportConfig(**{**given, "output": output}))


def test_what_the_engine_says_is_not_about_the_file(run, tmp_path, monkeypatch):
    def exhausted(*args, **named):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM. Keep less in memory.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("keras.Model.export", exhausted)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        export.main(run, ExportConfig(format="saved_model", output="served"))


def test_a_run_without_checkpoints_has_its_model(run, wanted, tmp_path, capsys):
    """Which is converted to another format."""
    copy = shutil.copytree(run, tmp_path / "run", ignore=lambda *_: ["checkpoints"])
    assert export.main(str(copy), ExportConfig(format="saved_model")) == 0
    assert capsys.readouterr().out == f"{copy}/export-000000005  step 5, from {copy}/model.keras\n"
    served = tf.saved_model.load(str(copy / "export-000000005"))
    np.testing.assert_allclose(served.serve(IMAGES), wanted, rtol=1e-5)


def test_a_run_of_a_program(single, tmp_path):
    """The checkpoints of a program do not name its model."""
    with single.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse")
    saved = tfdist.Checkpoints(directory=str(tmp_path), every="1")
    trainer.fit((np.zeros((4, 2)), np.zeros((4, 1))), batch_size=4, steps=1, checkpoints=saved)
    with pytest.raises(InputError) as raised:
        export.main(str(tmp_path), ExportConfig())
    assert "step-000000001, which has no flags, because a program wrote it." in str(raised.value)
    assert f"trainer.resume('{tmp_path}')" in str(raised.value)


OWN = """
import keras

def line(width):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(width), keras.layers.Dense(10)])
"""


@pytest.fixture
def own_run(tmp_path, monkeypatch) -> str:
    """A run of a user-defined model whose module is not imported yet."""
    (tmp_path / "own_of_export.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = str(tmp_path / "run")
    model = "own_of_export:line(width=3)"
    train.main(TrainConfig(strategy="single", model=model, steps=1, checkpoint_every="1", output_dir=path))
    monkeypatch.delitem(sys.modules, "own_of_export")
    return path


def test_code_that_a_checkpoint_names_is_run_if_one_says_so(own_run, monkeypatch, capsys):
    with pytest.raises(InputError) as raised:
        export.main(own_run, ExportConfig())
    assert str(raised.value) == (
        "The run refers to user code, or to files that name code, which is imported and called only with --safe_mode=false. "
        f"Received: {own_run}/checkpoints/step-000000001, which names --model=own_of_export:line(width=3). If you trust "
        "that, add --safe_mode=false."
    )
    assert "own_of_export" not in sys.modules
    assert export.main(own_run, ExportConfig(safe_mode=False)) == 0
    assert f"{own_run}/export-000000001.keras  step 1" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "own_of_export")


_CODE = ("os:system(command='true')", "keras.models:load_model(filepath='a.keras')", "tfdist.run:main")
_BY_OTHER_MEANS = [
    ("dataset", "tfds:ds"),  # whose features.json may name any module
    ("dataset", "tfds:ds(data_dir='data')"),
    ("dataset", "digits:main"),
    ("model", "mlp:main"),
    ("loss", "mean_squared_error(dtype={'module': 'os', 'class_name': 'system'})"),
    ("optimizer", "sgd(name=[{'module': 'os'}])"),
]


@pytest.mark.parametrize(
    ("name", "code"), [*itertools.product(["model", "dataset", "loss", "optimizer", "decay"], _CODE), *_BY_OTHER_MEANS]
)
def test_code_of_any_package_in_any_flag(name, code):
    with pytest.raises(InputError) as raised:
        trained_run.check_safe_mode(TrainConfig(**{name: code}), Path("step-1"))
    assert f"step-1, which names --{name}={code}. If" in str(raised.value)
    trained_run.check_safe_mode(TrainConfig(**{name: code}), Path("step-1"), [name])  # of the command


@pytest.mark.parametrize("dataset", ["digits", "synthetic:8x8x1(classes=2)", "csv:a.csv(label='b')", "text(length=8)"])
def test_names_of_tfdist_s_own_are_no_code(dataset):
    config = TrainConfig(
        dataset=dataset, model="mlp(hidden=(2,))", optimizer="lars", metrics="accuracy,mae", recompute=".{2}"
    )
    trained_run.check_safe_mode(config, Path("step-1"))


def test_every_flag_says_what_a_run_may_name():
    """An export ignores training-only flags of a run; it takes the strategy from the command."""
    texts = [f for f in dataclasses.fields(TrainConfig) if not isinstance(f.default, int | float)]
    undeclared = {f.name for f in texts if not (f.metadata["flag"].safe_values or f.metadata["flag"].choices)}
    assert undeclared - {*field_names(TrainConfig, "training_only")} == {"strategy", "tpu"}
