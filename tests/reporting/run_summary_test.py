"""What the files of a run say, complete or not; tables, differences and a picture of several runs."""

import datetime
import io
import json

import pytest

from tfdist.checkpoint.format import lock
from tfdist.errors import InputError
from tfdist.reporting.plain_reporter import text_table
from tfdist.reporting.run_summary import (
    AXES,
    KILLED,
    RUNNING,
    abbreviate,
    as_json,
    differences,
    draw,
    duration,
    fit_rows,
    is_higher_better,
    read_run,
    results,
    table,
)

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
    assert (run.steps, run.total_steps, run.start_time) == (3, 5, 1000.0)
    assert run.seconds == 5.0 + 4.0  # of each start, until its last record or its end
    assert run.flags == {"model": "mlp", "steps": "0", "epochs": "2", "optimizer": "sgd(momentum=0.9)"}
    assert run.versions == {"keras": "3"}
    assert run.metrics == ["loss", "accuracy"]
    assert run.best("loss") == (2, 1.0) and run.best("accuracy") == (2, 0.75) and run.last("accuracy") == 0.625
    assert run.best("other") is None and run.last("other") is None


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


def test_a_run_that_has_just_begun(tmp_path):
    path = write(tmp_path / "a", [{"step": 0, "flags": [], "started": "2026-01-01T00:00:00+00:00"}], ())
    (path / "metrics.jsonl").write_text('{"kind"')  # killed while it wrote
    run = read_run(path, "a")
    assert (run.steps, run.strategy, run.total_steps, run.seconds, run.replicas) == (0, "", None, None, None)
    assert not run.flags and not run.versions and run.best("loss") is None


@pytest.mark.parametrize(
    ("contents", "message"),
    [(None, "it is not the directory of a run"), ("", "is empty"), ("\xff", "Each line of")],
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


@pytest.fixture
def runs(tmp_path):
    other = start(0, 2000.0, strategy="single", replicas=1, versions={"keras": "3.1"})
    other["flags"] = ["--model=cnn", "--steps=7", "--epochs=2", "--output_dir=other", "--new="]
    first = write(tmp_path / "first", [start(0, 1000.0, replicas=1, strategy="single", versions={"keras": "3.1"})])
    second = write(tmp_path / "second", [other], [], outcome="failed")
    return [read_run(first, "first"), read_run(second, "second")]


def test_the_table(runs):
    header, first, second = table(runs, "accuracy")
    assert header.split() == (
        "run started strategy model dataset steps status loss best loss accuracy best accuracy time".split()
    )
    assert first.index("0.7500 @2") == header.index("best accuracy")
    assert second.split()[3:] == "single x1 cnn - 0/7 failed - - - - -".split()


def test_the_number_of_parameter_servers_is_shown(tmp_path):
    served = start(0, 1000.0, replicas=2, servers=1, strategy="parameter_server")
    assert "  parameter_server x2, 1 server  " in table([read_run(write(tmp_path, [served]), "first")], "loss")[1]


def test_a_long_dataset_is_shortened_in_the_middle_and_what_has_no_room_is_named(tmp_path):
    long = start(0, 1000.0, replicas=2, strategy="mirrored")
    long["flags"] = ["--model=cnn", "--dataset=csv:/data/measurements/2026/november/table.csv(label='kind')"]
    run = read_run(write(tmp_path / "first", [long]), "first")
    assert "csv:/data/measurements/2026/november/table.csv(label='kind')" in table([run], "accuracy")[1]
    assert "csv:/data...='kind')" in table([run], "accuracy", 140)[1] and len(table([run], "accuracy", 140)) == 2
    lines = table([run], "accuracy", 80)
    assert max(map(len, lines)) <= 80 and "best accuracy" in lines[0] and "csv:/data...='kind')" in lines[1]
    assert lines[2].startswith("Omitted in 80 columns: started, loss, accuracy, best loss")
    assert max(map(len, text_table(fit_rows([["dataset", run.flags["dataset"], "digits"]], 80)))) <= 80


@pytest.mark.parametrize(("length", "text"), [(10, "0123456789"), (9, "012...789"), (8, "012...89"), (3, "...")])
def test_the_middle_is_replaced(length, text):
    assert abbreviate("0123456789", length) == text


def test_differences(runs):
    assert differences(runs) == [
        ["model", "mlp", "cnn"],
        ["new", "-", '""'],
        ["optimizer", "sgd(momentum=0.9)", "-"],
        ["steps", "0", "7"],
    ]
    assert differences([runs[0], runs[0]]) == []


def test_results(runs):
    found = {row[0]: row[1:] for row in results(runs)}
    assert found["best loss"] == ["1.0000 @2", "-"] and found["last loss"] == ["nan", "-"]
    assert found["status"] == ["killed", "failed"]


def test_values_for_programs(runs):
    found = as_json(runs[0])
    assert found["best"]["accuracy"] == {"step": 2, "value": 0.75}
    assert found["status"] == "killed"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (1.25, "1.2 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (18060, "5 h 01 min"),
        (273600, "3 d 04 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_nothing_that_a_terminal_would_interpret_is_printed():
    assert text_table([["a\x1b[2J", "b"]]) == ["a [2J  b"]
    assert text_table([]) == []


@pytest.fixture
def three_runs(tmp_path):
    write(tmp_path / "_first$", records=RECORDS)
    write(tmp_path / "second", records=[{**record, "loss": 500.0} for record in RECORDS])
    write(tmp_path / "empty", records=[])
    return [read_run(tmp_path / name, name) for name in ("_first$", "second", "empty")]


@pytest.mark.parametrize("axis", AXES)
def test_each_metric_has_a_panel_and_each_run_a_color(three_runs, axis):
    figure = draw(three_runs, ["loss", "accuracy", "other"], axis)
    assert figure.get_suptitle() == "Comparison of 3 runs"
    loss, accuracy, other = figure.axes
    assert [panel.get_xlabel() for panel in figure.axes] == [AXES[axis]] * 3
    assert loss.get_ylabel() == "loss (logarithmic)" and accuracy.get_ylabel() == "accuracy"
    assert [text.get_text() for text in other.texts] == ["nothing to draw"]
    [legend] = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [r"first\$", "second", "empty", "training", "evaluation", "best evaluation"]
    first, second = [line for line in accuracy.lines if line.get_marker() == "o"]
    assert first.get_color() != second.get_color()
    best = next(line for line in accuracy.lines if line.get_marker() == "*")
    wanted = {"step": 2, "epoch": 2 / 3, "time": 4 / 60}[axis]
    assert best.get_xydata().tolist() == [[pytest.approx(wanted), 0.75]]
    figure.savefig(io.BytesIO(), format="png")
