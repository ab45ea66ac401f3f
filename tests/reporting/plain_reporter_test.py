"""Reporters: lines of text, what all of them are told, epochs in a plan, and the files of the chief."""

import io
import json
import math
import re
import sys
from unittest import mock

import pytest

from tests.user_commands import captured
from tfdist.reporting import Reporter, RunDirectory, RunPlan
from tfdist.reporting.display import chief_reporter
from tfdist.reporting.plain_reporter import PlainReporter, banner, format_number, line, loss_and_metrics
from tfdist.reporting.reporter import MultiReporter, OutcomeFile

TRAIN = {
    "kind": "train",
    "step": 100,
    "epoch": 4.4537,
    "loss": 0.31,
    "accuracy": 0.9125,
    "examples_per_second": 5123.4,
    "step_seconds": 0.0125,
    "gradient_norm": 1.7,
}


def test_a_pipe_sees_the_description_a_line_for_each_record_and_one_for_the_end():
    stream, times = io.StringIO(), iter([10.0, 14.25])
    reporter = PlainReporter(stream, lambda: next(times))
    about = {"model": "mlp, 10 parameters", "chosen": "", "output": "runs/one"}
    reporter.start(RunPlan(total_steps=500, batch_size=64, examples_per_epoch=1437, description=about))
    with reporter.busy("compiling the training step"):
        pass
    reporter.progress(50, {"loss": 0.5})
    reporter.record(TRAIN)
    reporter.record({"kind": "eval", "step": 100, "loss": 0.2, "accuracy": 0.97})
    reporter.close("done")
    assert stream.getvalue().splitlines() == [
        "model   mlp, 10 parameters",
        "output  runs/one",
        "compiling the training step took 4.2 s",
        "step 100/500  epoch 5/23  train  loss 0.3100  accuracy 0.9125  5123 examples/s  0.0125 s/step",
        "step 100/500  epoch 5/23  eval  loss 0.2000  accuracy 0.9700",
        "run ended: done",
    ]


@pytest.mark.parametrize("shows", [True, False])
def test_communication_is_shown_when_the_plan_says_so(shows):
    record = TRAIN | {"payload_bytes": 85900.0, "compression_ratio": 4.0}
    shown = line(record, RunPlan(total_steps=500, batch_size=64, shows_communication=shows))
    assert ("sent 83.9 KiB (4x less)" in shown) is shows


def worker(rate, compute=1.0, **waits):
    return {
        "updates": 10 * rate,
        "updates_per_second": rate,
        "compute_seconds": compute,
        "wait_seconds": {"data": 0.0, "workers": 0.0, "pull": 0.0, "push": 0.0, **waits},
    }


WORKERS = {
    "a slow worker": ([worker(15.3), worker(5.1)], "staleness 1.92|rank 1 5.1 of 20.4 updates/s"),
    "one waits": ([worker(9.0, pull=0.2, workers=1.0), worker(9.0)], "staleness 1.92|rank 0 waits 45% for workers"),
    "all are equal": ([worker(9.0, push=0.1), worker(8.0)], "staleness 1.92"),
    "nothing is done": ([worker(0, compute=0.0)], "staleness 1.92"),
    "no servers": ([], ""),
}


@pytest.mark.parametrize("case", WORKERS)
def test_the_slowest_worker_and_who_waits_are_shown(case):
    found, expected = WORKERS[case]
    record = TRAIN | {"staleness": 1.92, "workers": found}
    assert line(record).partition("s/step")[2].strip().replace("  ", "|") == expected


def test_lines_leave_at_once():
    class Flushes(io.StringIO):
        flushed = ""

        def flush(self):
            self.flushed = self.getvalue()

    stream = Flushes()
    PlainReporter(stream).record(TRAIN)
    assert stream.flushed.endswith("s/step\n")


@pytest.mark.parametrize("missing", TRAIN)
def test_any_field_may_be_missing(missing):
    record = {name: value for name, value in TRAIN.items() if name != missing}
    assert line(record)
    assert line({})


def test_values_that_json_has_as_text_are_shown():
    assert line({"step": 3, "loss": "nan", "accuracy": "inf"}) == "step 3  train  loss nan  accuracy inf"


def test_the_load_of_each_expert_is_in_the_file_alone():
    record = {"loss": 1.0, "accuracy_1": 0.5, "moe_load_cv": 0.25, "moe_expert_0": 0.1, "moe_expert_11": 0.9}
    assert list(loss_and_metrics(record)) == ["loss 1.0000", "accuracy_1 0.5000", "moe_load_cv 0.2500"]


def test_no_control_character_gets_through():
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.record({"step": 1, "loss": 1.0, "my\rmetric\x1b[2J": 2.0})
    reporter.close("failed:\nline two\t\x1b[31m")
    lines = stream.getvalue().removesuffix("\n").split("\n")
    assert len(lines) == 2
    assert all(text.isprintable() for text in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (0.31, "0.3100"), (2.3e-5, "2.3e-05"), (12.5, "12.50"), (5123.4, "5123"), (2e8, "2e+08")]
    + [(math.nan, "nan"), (-math.inf, "-inf"), (-0.5, "-0.5000")],
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text


def test_reporting_is_light_until_something_heavy_is_asked_for():
    code = "import sys, tfdist.reporting; print({'tensorflow', 'matplotlib', 'tensorboard'} & {*sys.modules})"
    assert captured([sys.executable, "-c", code], check=True).stdout == "set()\n"


def test_rows_are_aligned_wrapped_and_without_control_characters():
    path = "runs/" + "x" * 90
    rows = banner({"model": "mlp\x1b[2J", "chosen": "", "strategy": "word " * 20, "output": path})
    assert rows == [
        "model     mlp [2J",
        "strategy  " + ("word " * 13).rstrip(),
        "          " + ("word " * 7).rstrip(),
        f"output    {path}",
    ]


PLAN = RunPlan(total_steps=10, batch_size=4, examples_per_epoch=16)


def test_a_plan_counts_epochs_where_the_size_is_known():
    assert PLAN.epoch(6) == 1.5
    assert RunPlan(total_steps=10, batch_size=4).epoch(6) is None


def test_all_are_told_everything():
    heard = [mock.Mock(spec=Reporter), mock.Mock(spec=Reporter)]
    reporter = MultiReporter(heard)
    reporter.start(PLAN)
    reporter.progress(1, {"loss": 2.0})
    reporter.record({"step": 1})
    reporter.sync()
    reporter.close("done")
    calls = [
        mock.call.start(PLAN),
        mock.call.progress(1, {"loss": 2.0}),
        mock.call.record({"step": 1}),
        mock.call.sync(),
    ]
    assert [one.mock_calls for one in heard] == [[*calls, mock.call.close("done")]] * 2


def test_all_are_closed_in_order_even_if_one_fails():
    heard = mock.Mock()
    heard.b.close.side_effect = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        MultiReporter([heard.a, heard.b, heard.c]).close("done")
    assert heard.mock_calls == [mock.call.a.close("done"), mock.call.b.close("done"), mock.call.c.close("done")]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (0, "epoch 1/20"),
        (1, "epoch 1/20"),
        (22, "epoch 1/20"),
        (23, "epoch 1/20"),
        (24, "epoch 2/20"),
        (449, "epoch 20/20"),
    ]
    + [(450, "epoch 20/20")],
)
def test_epochs_are_counted_as_people_do(step, text):
    """20 epochs of 1437 examples end in step 450, which uses 60 examples of the next one."""
    assert RunPlan(total_steps=450, batch_size=64, examples_per_epoch=1437).epoch_text(step) == text


def test_epochs_of_a_run_that_continues():
    plan = RunPlan(total_steps=28, batch_size=10, examples_per_epoch=70, first_step=14)
    assert plan.epoch_text(14) == "epoch 3/4" and plan.epoch_text(28) == "epoch 4/4"
    again = RunPlan(total_steps=28, batch_size=10, examples_per_epoch=70, first_step=14, first_epoch=2)
    assert again.epoch_text(14) == "epoch 1/2" and again.epoch_text(15) == "epoch 1/2"
    done = RunPlan(total_steps=14, batch_size=10, examples_per_epoch=70, first_step=14)
    assert done.epoch_text(14) == "epoch 2/2"
    assert RunPlan(total_steps=14, batch_size=10).epoch_text(3) == ""


def test_a_long_task_is_told_to_every_reporter():
    streams = io.StringIO(), io.StringIO()
    with MultiReporter([PlainReporter(stream) for stream in streams]).busy("compiling"):
        pass
    assert all(re.fullmatch(r"compiling took \d\.\d s\n", stream.getvalue()) for stream in streams)


def test_a_run_leaves_every_file_and_plain_lines(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.begin("", hosts=["alpha"])
    stream = io.StringIO()
    reporter = chief_reporter(directory, stream)
    reporter.start(RunPlan(total_steps=2, batch_size=4, examples_per_epoch=8))
    reporter.progress(1, {"loss": 1.0})
    reporter.record({"kind": "train", "step": 2, "loss": 0.5, "accuracy": 0.5})
    reporter.record({"kind": "eval", "step": 2, "loss": 0.25, "accuracy": 0.75})
    reporter.close("done")
    assert [json.loads(line)["kind"] for line in directory.metrics.read_text().splitlines()] == ["train", "eval"]
    assert directory.curves.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in directory.tensorboard.iterdir()) == ["eval", "train"]
    assert stream.getvalue().splitlines() == [
        "step 2/2  epoch 1/1  train  loss 0.5000  accuracy 0.5000",
        "step 2/2  epoch 1/1  eval  loss 0.2500  accuracy 0.7500",
        "run ended: done",
    ]


def test_the_outcome_is_that_of_the_last_start(tmp_path):
    path = tmp_path / "outcome.json"
    for outcome in ("preempted", "done"):
        reporter = OutcomeFile(path, clock=lambda: 5.0)
        assert not path.exists()
        reporter.start(RunPlan(total_steps=1, batch_size=1))
        reporter.progress(1, {})
        reporter.record({"kind": "train", "step": 1})
        assert not path.exists()
        reporter.close(outcome)
        assert json.loads(path.read_text()) == {"outcome": outcome, "time": 5.0}
