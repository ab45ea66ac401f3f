"""`--find` and `--dry_run` in this process: their files, what they say, and what they refuse."""

import json
import re

import keras
import numpy as np
import pytest

from tests import documented_json
from tfdist import train
from tfdist.cli.output import TEXT
from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError

QUICK = {"strategy": "single", "model": "mlp(hidden=(8,))", "dataset": "digits", "steps": 4}
FIND = "learning_rate(min=0.0001, max=10, steps=20)"


def run(path, **flags):
    return train.main(TrainConfig(output_dir=str(path), **(QUICK | flags)))


def weights(path):
    return [w.tobytes() for w in keras.saving.load_model(path / "model.keras").get_weights()]


def test_a_run_in_the_directory_of_a_search_is_one_that_never_searched(tmp_path, capsys):
    for _ in range(2):  # a search may be repeated
        assert run(tmp_path / "run", find=FIND) == 0
        first, use, picture = capsys.readouterr().out.splitlines()
        names = ["find", "learning_rate.json", "learning_rate.png", "rank-0.log", "run"]
        assert sorted(path.name for path in tmp_path.rglob("*")) == names
    found = json.loads((tmp_path / "run/find/learning_rate.json").read_text())
    assert first.startswith(f"Suggested learning rate: {found['suggestion']:g}. The loss falls fastest there;")
    assert use == f"Train with --learning_rate={found['suggestion']:g}."
    assert picture == str(tmp_path / "run/find/learning_rate.png")
    assert (tmp_path / "run/find/learning_rate.png").read_bytes().startswith(b"\x89PNG")
    assert found["rates"][:20] == pytest.approx(np.geomspace(1e-4, 10, 20)[: len(found["rates"])])
    documented_json.check_file("find/learning_rate.json", found)
    assert found["flags"]["model"] == QUICK["model"] and "output_dir" not in found["flags"]
    assert run(tmp_path / "run") == run(tmp_path / "other") == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "other")
    with pytest.raises(InputError, match="an output directory without a run. Received: .*run, which has one"):
        run(tmp_path / "run", find=FIND)


def test_the_line_names_the_flags_that_change_the_rate(tmp_path, capsys):
    flags = {"lr_scaling": "linear", "base_batch_size": 16, "warmup_steps": 2, "decay": "cosine"}
    assert run(tmp_path / "run", find=FIND, **flags) == 0
    use = capsys.readouterr().out.splitlines()[1]
    suggestion = json.loads((tmp_path / "run/find/learning_rate.json").read_text())["suggestion"]
    assert use == (
        f"Train with --learning_rate={suggestion / 4:.2g} (--lr_scaling=linear multiplies it by 4, and it is the highest "
        "rate of --warmup_steps and --decay)."
    )


GIVEN = {"strategy": "auto", "model": "mlp(hidden=(8,))", "dataset": "synthetic:4x4x1", "batch_size": 25, "steps": 30}


@pytest.mark.tensorflow
def test_json_says_what_the_text_says(capsys: pytest.CaptureFixture[str]):
    config = TrainConfig(**GIVEN, accumulate_steps=2, dry_run=True)
    record = documented_json.printed("train", train.main, config)
    assert not capsys.readouterr().out
    assert train.main(config, TEXT) == 0
    text = capsys.readouterr().out
    said = dict(re.findall(r"^ +([\w -]+): (.*)$", text, re.MULTILINE))
    assert record["flags"]["strategy"] == record["strategy"] == "single"
    assert "--strategy=single\n" in text and "json" not in record["flags"]
    assert said["strategy"] == record["reason"]
    assert said["processes"] == f"{record['processes']} on {record['hosts'][0]}"
    assert said["global batch"] == f"{record['global_batch_examples']} examples"
    assert record["micro_batch_examples"] == [12, 13]
    assert said["per micro-step"] == f"12 or 13 examples, {record['micro_steps_per_step']} per step"
    assert said["training set"] == f"{record['training_examples']} examples"
    assert said["test set"] == f"{record['test_examples']} examples"
    assert said["steps"] == f"{record['steps']} ({record['epochs']:.2f} epochs)"
    assert said["parameters"] == f"{record['parameters']:,}"


@pytest.mark.tensorflow
def test_the_rows_of_an_uneven_allocation():
    config = TrainConfig(
        **{**GIVEN, "strategy": "mirrored"}, devices=2, balance="weights(4,1)", accumulate_steps=2, dry_run=True
    )
    record = documented_json.printed("train", train.main, config)
    assert (record["replica_batch_examples"], record["micro_batch_examples"]) == ([5, 20], [2, 3, 10])
