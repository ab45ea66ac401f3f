"""Tables of runs and of their differences."""

import pytest

from tests.reporting.run_summary_test import start, write
from tfdist.reporting.run_summary import read_run
from tfdist.reporting.runs_table import aligned, as_json, differences, duration, fitted, results, shortened, table


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
        "run started strategy model data set steps status loss best loss accuracy best accuracy time".split()
    )
    assert first.index("0.7500 @2") == header.index("best accuracy")
    assert second.split()[3:] == "single x1 cnn - 0/7 failed - - - - -".split()


def test_a_long_data_set_is_shortened_in_the_middle_and_what_has_no_room_is_named(tmp_path):
    long = start(0, 1000.0, replicas=2, strategy="mirrored")
    long["flags"] = ["--model=cnn", "--dataset=csv:/data/measurements/2026/november/table.csv(label='kind')"]
    run = read_run(write(tmp_path / "first", [long]), "first")
    assert "csv:/data/measurements/2026/november/table.csv(label='kind')" in table([run], "accuracy")[1]
    assert "csv:/data...='kind')" in table([run], "accuracy", 140)[1] and len(table([run], "accuracy", 140)) == 2
    lines = table([run], "accuracy", 80)
    assert max(map(len, lines)) <= 80 and "best accuracy" in lines[0] and "csv:/data...='kind')" in lines[1]
    assert lines[2].startswith("Left out in 80 columns: started, loss, accuracy, best loss")
    assert max(map(len, aligned(fitted([["data set", run.flags["dataset"], "digits"]], 80)))) <= 80


@pytest.mark.parametrize(("length", "text"), [(10, "0123456789"), (9, "012...789"), (8, "012...89"), (3, "...")])
def test_the_middle_is_replaced(length, text):
    assert shortened("0123456789", length) == text


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
    assert aligned([["a\x1b[2J", "b"]]) == ["a [2J  b"]
    assert aligned([]) == []
