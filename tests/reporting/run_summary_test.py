"""What the files of a run say, complete or not."""

import datetime
import json

import pytest

from tfdist.checkpoint.format import lock
from tfdist.errors import InputError
from tfdist.reporting.run_summary import KILLED, RUNNING, is_higher_better, read_run

FLAGS = ["--model=mlp", "--steps=0", "--epochs=2", "--optimizer=sgd(momentum=0.9)", "# --output_dir=x"]


def start(step: int, at: float, **others) -> dict:
    started = datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()
    return {"step": step, "flags": FLAGS, "started": started, "batch_size": 4, "examples": 10, **others}


def record(kind: str, step: int, at: float, **values) -> dict:
    return {"schema": 1, "kind": kind, "step": step, "epoch": step / 3, "time": at, **values}


RECORDS = (
    record("train", 1, 1001.0, loss=3.0, learning_rate=0.1),
    record("eval", 1, 1002.0, loss=2.0, accuracy=0.5),
    record("eval", 2, 1005.0, loss=1.0, accuracy=0.75),
    record("eval", 3, 1103.0, loss="nan", accuracy=0.625),
)


FIRST = start(0, 1000.0)


def write(path, starts=(FIRST,), records=RECORDS, outcome=None, model=False):
    path.mkdir(parents=True, exist_ok=True)
    for name, lines in (("starts.jsonl", starts), ("metrics.jsonl", records)):
        (path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if outcome:
        (path / "outcome.json").write_text(json.dumps({"outcome": outcome, "time": 1104.0}))
    if model:
        (path / "model.keras").write_bytes(b"model")
    return path


def test_a_run(tmp_path):
    starts = (start(0, 1000.0), start(2, 1100.0, strategy="mirrored", replicas=2, versions={"keras": "3"}))
    run = read_run(write(tmp_path / "a", starts, outcome="done"), "a")
    assert (run.name, run.strategy, run.replicas, run.starts) == ("a", "mirrored", 2, 2)
    assert (run.steps, run.total_steps, run.started) == (3, 5, 1000.0)
    assert run.seconds == 5.0 + 4.0  # of each start, until its last record or its end
    assert run.flags == {"model": "mlp", "steps": "0", "epochs": "2", "optimizer": "sgd(momentum=0.9)"}
    assert run.versions == {"keras": "3"}
    assert run.metrics == ["loss", "accuracy"]
    assert run.best("loss") == (2, 1.0) and run.best("accuracy") == (2, 0.75) and run.last("accuracy") == 0.625
    assert run.best("other") is None and run.last("other") is None
    assert run.points("loss", "train") == [(1, 3.0)]


@pytest.mark.parametrize(
    ("outcome", "model", "status"),
    [
        ("done", True, "finished"),
        (None, True, KILLED),  # a finished run that was continued
        (None, False, KILLED),
        ("preempted", False, "preempted"),
        ("loss not finite", False, "loss not finite"),
        ("failed", True, "failed"),  # when it was continued
    ],
)
def test_status(tmp_path, outcome, model, status):
    (path := write(tmp_path / "a", outcome=outcome, model=model) / "lock").write_text("process 1 on x since then\n")
    assert read_run(path.parent, "a").status == status
    assert path.read_text() == "process 1 on x since then\n"  # after a kill
    with lock(path.parent):
        assert read_run(path.parent, "a").status == RUNNING
    assert read_run(path.parent, "a").status == status


def test_a_finished_run_of_an_earlier_version(tmp_path):
    path = write(tmp_path / "a", records=(*RECORDS, record("eval", 5, 1104.0, loss=1.0)), model=True)
    assert read_run(path, "a").status == "finished"


def test_what_is_damaged_or_missing_is_unknown(tmp_path):
    path = write(
        tmp_path / "a", [{"step": 0, "flags": 5, "started": "then", "versions": [], "replicas": -1, "examples": 0}]
    )
    (path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": [1], "accuracy": null}\n{"kind"')
    (path / "outcome.json").write_text("[" * 9999)
    run = read_run(path, "a")
    assert (run.steps, run.total_steps, run.started, run.seconds, run.strategy, run.replicas) == (
        1,
        None,
        None,
        None,
        "",
        None,
    )
    assert not run.flags and not run.versions and run.best("loss") is None
    for name in ("metrics.jsonl", "outcome.json"):
        (path / name).unlink()
    assert read_run(path, "a").steps == 0


@pytest.mark.parametrize(
    ("contents", "message"),
    [(None, "it is not the directory of a run"), ("", "is empty"), ("{}\n", "Each line of"), ("\xff", "Each line of")],
)
def test_what_is_no_run(tmp_path, contents, message):
    if contents is not None:
        (tmp_path / "starts.jsonl").write_text(contents, encoding="latin-1")
    with pytest.raises(InputError, match=message):
        read_run(tmp_path, "a")


def test_the_direction_of_a_metric_follows_from_its_name():
    higher = ("accuracy", "sparse_top_k_categorical_accuracy", "auc", "precision", "f1_score", "mean_io_u", "r2_score")
    assert [name for name in higher if not is_higher_better(name)] == ["mean_io_u"]
    lower = ("loss", "accuracy_loss", "mean_absolute_error", "perplexity", "root_mean_squared_error")
    assert not any(map(is_higher_better, lower))
