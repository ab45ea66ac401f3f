import time

import pytest

from tfdist.checkpoint.best import Best
from tfdist.checkpoint.manager import Checkpoints
from tfdist.cli.run_end import Run, summary
from tfdist.reporting import RunDirectory
from tfdist.trainer.options import Reporting

RECORDS = [
    {"kind": "train", "step": 5, "loss": 0.9, "accuracy": 0.5},
    {"kind": "eval", "step": 10, "loss": 0.5, "accuracy": 0.9, "recall": 0.1},
    {"kind": "eval", "step": 20, "loss": 0.4, "accuracy": 0.8, "recall": 0.2},
]


def run(path, seconds, monkeypatch, every="100"):
    """A run that has taken some seconds."""
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    checkpoints = Checkpoints(directory=str(path), every=every)
    return Run(RunDirectory(path), is_chief=True, checkpoints=checkpoints, reporting=Reporting(), began=0.0)


def test_the_end_has_the_result_the_best_value_what_is_next_and_the_directory_last(tmp_path, monkeypatch):
    assert summary(run(tmp_path / "a run", 83.2, monkeypatch), RECORDS, None, "--checkpoint=best") == [
        "eval after 20 steps: loss 0.4000  accuracy 0.8000",
        "best accuracy 0.9000 at step 10; trained to step 20 in 1 min 23 s",
        f"next: python -m tfdist.evaluate '{tmp_path}/a run' --checkpoint=best, or tfdist.predict, or tfdist.export",
        "or train longer: the same command with more --epochs or --steps",
        "model.keras, curves.png, metrics.jsonl and logs are in",
        f"{tmp_path}/a run",
    ]


@pytest.mark.parametrize(
    ("records", "line"),
    [
        (
            [{"kind": "eval", "step": 3, "loss": 1.0}, {"kind": "eval", "step": 6, "loss": 2.0}],
            "best loss 1.0000 at step 3; ",
        ),
        (RECORDS[:2], ""),
        (RECORDS[:1], ""),
        ([{"kind": "eval", "step": 3, "loss": "nan"}, {"kind": "eval", "step": 6, "loss": "nan"}], ""),
    ],
)
def test_the_best_of_one_evaluation_or_of_none_is_not_mentioned(records, line, tmp_path, monkeypatch):
    found = summary(run(tmp_path, 4.25, monkeypatch, every="0"), records, None)
    assert found[1] == f"{line}trained to step {records[-1]['step']} in 4.2 s"
    assert found[2].endswith("or tfdist.export") and len(found) == 5


def test_a_best_value_that_was_exported_is_mentioned_instead(tmp_path, monkeypatch):
    best = Best("val_loss", "min", 0.4, 20)
    found = summary(run(tmp_path, 1.0, monkeypatch), RECORDS, best)[1]
    assert found.startswith(f"best {best}, exported as model.keras; ")
