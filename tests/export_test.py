"""The model of a run's checkpoint, for those who use it."""

import pkgutil
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

import tfdist
from tfdist import export, train
from tfdist.config import TrainConfig
from tfdist.errors import InputError
from tfdist.export import ExportConfig

IMAGES = np.random.default_rng(0).uniform(size=(3, 8, 8, 1)).astype("float32")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("runs") / "run")
    assert not train.main(
        TrainConfig(
            strategy="mirrored",
            devices=2,
            model="cnn(filters=(4,))",
            dataset="digits",
            steps=5,
            checkpoint_every="3",
            output_dir=path,
        )
    )
    return path


@pytest.fixture(scope="module")
def wanted(run) -> np.ndarray:
    return np.asarray(keras.models.load_model(f"{run}/model.keras", compile=False)(IMAGES))


def test_keras_s_format(run, wanted, capsys):
    assert export.main(run, ExportConfig()) == 0
    path = f"{run}/export-000000005.keras"
    assert capsys.readouterr().out == f"{path}  step 5, from {run}/checkpoints/step-000000005\n"
    np.testing.assert_allclose(keras.models.load_model(path)(IMAGES), wanted, rtol=1e-6)


def test_a_saved_model(run, wanted, tmp_path):
    export.main(run, ExportConfig(format="saved_model", output=str(tmp_path / "served")))
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(IMAGES), wanted, rtol=1e-5)


def test_safetensors(run, tmp_path):
    path = tmp_path / "new" / "weights.safetensors"
    export.main(run, ExportConfig(format="safetensors", output=str(path)))
    found = load_file(path)
    model = keras.models.load_model(f"{run}/model.keras", compile=False)
    assert found.keys() == {v.path for v in model.variables}
    for variable in model.variables:
        np.testing.assert_array_equal(found[variable.path], variable)


def test_a_tilde_is_the_home(run, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(Path(run).parent))
    export.main("~/run", ExportConfig(format="safetensors", output="~/home.safetensors"))
    assert Path(f"{run}/../home.safetensors").is_file()
    export.main("~/run", ExportConfig(format="safetensors"))
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{run}/export-000000005.safetensors  step 5")


def test_one_checkpoint_of_a_run(run, capsys):
    """It is the one that is written, and not into the checkpoint's own folder."""
    export.main(f"{run}/checkpoints/step-000000003", ExportConfig())
    assert capsys.readouterr().out.startswith(f"{run}/export-000000003.keras  step 3, from ")


@pytest.mark.parametrize(
    ("kind", "name", "owner", "writer"),
    [
        ("keras", "a.keras", "tfdist.Trainer", "save"),
        ("saved_model", "a", "keras.Model", "export"),
        ("safetensors", "a.safetensors", "tfdist.checkpoint", "write_shard"),
    ],
)
def test_half_of_a_model_is_never_there(run, kind, name, owner, writer, tmp_path, monkeypatch):
    """As when the disk is full before the end."""
    whole = getattr(pkgutil.resolve_name(owner), writer)

    def full(*args, **named):
        whole(*args, **named)
        raise OSError("No space left on device")

    monkeypatch.setattr(f"{owner}.{writer}", full)
    with pytest.raises(OSError, match="No space left"):
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
    assert sorted(path.name for path in last.iterdir()) == ["step-000000003", "step-000000005"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output": "model.h5"}, "must be a path ending in .keras"),
        ({"format": "saved_model", "output": "model.keras"}, "without an ending"),
    ],
)
def test_where_it_cannot_be_written(run, given, message):
    with pytest.raises(InputError, match=message):
        export.main(run, ExportConfig(**given))


def test_what_is_there_is_not_written_over(run, tmp_path):
    (tmp_path / "a.keras").write_text("")
    with pytest.raises(InputError, match="not there yet"):
        export.main(run, ExportConfig(output=str(tmp_path / "a.keras")))


def test_a_run_without_checkpoints(tmp_path):
    with pytest.raises(InputError, match="started with --checkpoint_every"):
        export.main(str(tmp_path), ExportConfig())


def test_a_run_of_a_program(single, tmp_path):
    """Its checkpoints do not say what its model is."""
    with single.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse")
    saved = tfdist.Checkpoints(directory=str(tmp_path), every="1")
    trainer.fit((np.zeros((4, 2)), np.zeros((4, 1))), batch_size=4, steps=1, checkpoints=saved)
    with pytest.raises(InputError) as raised:
        export.main(str(tmp_path), ExportConfig())
    assert "step-000000001, which has none: a program made it." in str(raised.value)
    assert f"trainer.resume('{tmp_path}')" in str(raised.value)


def test_an_unknown_format():
    with pytest.raises(InputError, match="--format=onnx is not known"):
        ExportConfig(format="onnx")
