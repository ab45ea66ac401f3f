import io

import pytest

from tfdist.reporting import RunPlan
from tfdist.reporting.in_place import InPlaceReporter

PLAN = RunPlan(total_steps=500, batch_size=64, examples_per_epoch=1437, description={"model": "mlp"})


class Clock:
    """A simulated clock."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def reporter(stream, clock):
    return InPlaceReporter(stream, 90, 0.2, clock)


def states(stream: io.StringIO) -> list[str]:
    """Returns what was written as lines, each reduced to its last state."""
    return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in stream.getvalue().split("\n")]


def test_lines_remain_above_the_bar_and_states_overwrite_each_other(reporter, stream, clock):
    reporter.start(PLAN)
    with reporter.busy("compiling the training step"):
        assert states(stream)[-1].endswith("compiling the training step ...")
    for step in (10, 20, 30):
        clock.now += 1.0
        reporter.progress(step, {"loss": 1.25, "accuracy": 0.5})
    reporter.record({"kind": "eval", "step": 30, "loss": 0.5})
    assert states(stream)[-1].startswith("epoch 2/23") and states(stream)[-1].endswith("640.00 ex/s")
    reporter.close("done")
    lines = states(stream)
    assert lines[0] == "model  mlp" and lines[1] == "step 30/500  epoch 2/23  eval  loss 0.5000"
    assert lines[2].startswith("epoch 2/23 30/500 ━") and lines[3:] == ["run ended: done", ""]
    assert all(len(state) <= 90 for line in stream.getvalue().split("\n") for state in line.split("\r"))
    assert "\x1b" not in stream.getvalue()


def test_what_is_logged_meanwhile_is_a_line_of_its_own(reporter, stream):
    reporter.start(PLAN)
    stream.write("a warning\n")
    reporter.close("")
    assert states(stream)[1] == "a warning" and states(stream)[2].startswith("epoch 1/23")


def test_states_are_not_more_frequent_than_asked(reporter, stream, clock):
    reporter.start(PLAN)
    for step in range(1, 101):
        clock.now += 0.01
        reporter.progress(step, {"loss": 1.0})
    assert stream.getvalue().count("loss 1.0000") == 5


def test_an_evaluation_alone_needs_no_bar(reporter, stream):
    reporter.record({"kind": "eval", "step": 7, "loss": 0.5})
    reporter.close("")
    assert stream.getvalue() == "step 7  eval  loss 0.5000\n"
