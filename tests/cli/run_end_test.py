import pytest

from tfdist.cli.run_end import summary
from tfdist.reporting import RunDirectory

RECORDS = [
    {"kind": "train", "step": 5, "loss": 0.9, "accuracy": 0.5},
    {"kind": "eval", "step": 10, "loss": 0.5, "accuracy": 0.9, "recall": 0.1},
    {"kind": "eval", "step": 20, "loss": 0.4, "accuracy": 0.8, "recall": 0.2},
]


def test_the_end_has_the_result_the_best_value_what_is_next_and_the_directory_last(tmp_path):
    directory = RunDirectory(tmp_path / "a run")
    assert summary(directory, RECORDS, RECORDS[-1], "", 83.2, resumes=True, flags="--checkpoint=best") == [
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
def test_the_best_of_one_evaluation_or_of_none_is_not_mentioned(records, line, tmp_path):
    last = records[-1]
    found = summary(RunDirectory(tmp_path), records, last, "", 4.25, resumes=False)
    assert found[1] == f"{line}trained to step {last['step']} in 4.2 s"
    assert found[2].endswith("or tfdist.export") and len(found) == 5


def test_a_best_value_that_was_exported_is_mentioned_instead(tmp_path):
    exported = "val_loss 0.4 at step 20, exported as model.keras"
    assert summary(RunDirectory(tmp_path), RECORDS, RECORDS[-1], exported, 1.0, resumes=True)[1].startswith(
        f"best {exported}; "
    )
