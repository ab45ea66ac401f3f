"""What `--dry_run` says about a run, as text and as JSON."""

import re

import pytest

from tests import documented_json
from tfdist import train
from tfdist.cli.output import TEXT, Output
from tfdist.config.train_config import TrainConfig

GIVEN = {"strategy": "auto", "model": "mlp(hidden=(8,))", "dataset": "synthetic:4x4x1", "batch_size": 25, "steps": 30}


@pytest.mark.tensorflow
def test_json_says_what_the_text_says(capsys: pytest.CaptureFixture[str]):
    config = TrainConfig(**GIVEN, accumulate_steps=2, dry_run=True)
    output = Output(is_json=True)
    assert train.main(config, output) == 0
    assert not capsys.readouterr().out
    assert output.facts
    record = {"schema": 1, "command": "train", **output.facts}
    documented_json.check("train", record)
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
    output = Output(is_json=True)
    assert train.main(config, output) == 0
    assert output.facts
    assert output.facts["replica_batch_examples"] == [5, 20]
    assert output.facts["micro_batch_examples"] == [2, 3, 10]
