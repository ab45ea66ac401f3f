"""Training on a user's own files: one command per format, and exact resume."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.data.formats.writing import COLORS, example, write_image, write_records
from tfdist import train
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints
from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError
from tfdist.reporting import RunDirectory

MLP = "mlp(hidden=(16,))"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Writes the same 24 examples of three classes in each format."""
    rows, records, arrays = [], [], []
    for number in range(24):
        name, label = sorted(COLORS)[number % 3], number % 3
        path = tmp_path / "colors" / name / f"{number}.png"
        write_image(path, COLORS[name], 2 * number)
        pixels = tf.io.decode_png(path.read_bytes()).numpy()
        rows.append(f"{','.join(str(value) for value in pixels.mean(axis=(0, 1)))},{name}")
        records.append(example(image=path.read_bytes(), label=label))
        arrays.append(pixels)
    (tmp_path / "colors.csv").write_text("\n".join(["red,green,blue,name", *rows]))
    write_records(tmp_path / "colors-0.tfrecord", records[:10])
    write_records(tmp_path / "colors-1.tfrecord", records[10:])
    np.savez(tmp_path / "colors.npz", x=np.stack(arrays), y=np.arange(24) % 3)
    monkeypatch.chdir(tmp_path)


def run(output_dir: str, **flags) -> None:
    values = {"strategy": "single", "model": MLP, "steps": 30, "batch_size": 8, "learning_rate": 0.01}
    assert train.main(TrainConfig(output_dir=output_dir, **(values | flags))) == 0


@pytest.mark.parametrize(
    ("dataset", "augment"),
    [
        ("images:colors(validation_split=0.25)", "flip|brightness"),
        ("csv:colors.csv(label='name', validation_split=0.25, standardize=True)", ""),
        ("npz:colors.npz(validation_split=0.25)", ""),
        ("tfrecord:colors-*.tfrecord(features='image:image, label:int64', classes=3, validation_split=0.25)", "crop"),
    ],
)
def test_the_command_learns_from_each_format(dataset, augment):
    run("run", dataset=dataset, augment=augment)
    last = RunDirectory(pathlib.Path("run")).records()[-1]
    assert (last["kind"], last["step"]) == ("eval", 30) and last["accuracy"] >= 0.8


def test_a_resumed_run_with_augmentation_is_equal_bit_for_bit():
    flags = {"dataset": "images:colors", "augment": "flip|crop(padding=2)|contrast", "checkpoint_every": "7"}

    def weights(directory: str) -> dict[str, bytes]:
        saved = Checkpoint.open(complete_checkpoints(pathlib.Path(directory, "checkpoints"))[0])
        return {name: saved.read(name).tobytes() for name in saved.tensors}

    run("whole", **flags, steps=11)
    run("parts", **flags, steps=7)
    run("parts", **flags, steps=11)
    assert weights("parts") == weights("whole")
    run("plain", **(flags | {"augment": ""}), steps=11)
    assert weights("plain") != weights("whole")
    with pytest.raises(InputError, match=r"--augment=flip, but .* --augment=flip\|crop\(padding=2\)\|contrast"):
        run("parts", **(flags | {"augment": "flip"}), steps=20)
