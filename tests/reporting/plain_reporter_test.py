import io
import math
import subprocess
import sys

import pytest

from tfdist.reporting import PlainReporter, RunPlan
from tfdist.reporting.plain_reporter import line, loss_and_metrics, rounded

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
    assert rounded(value) == text


def test_reporting_is_light_until_something_heavy_is_asked_for():
    code = (
        "import sys, tfdist.reporting; "
        "print([name for name in ('tensorflow', 'matplotlib', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
