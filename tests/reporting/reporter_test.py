import io
import re

import pytest

from tfdist.reporting import MultiReporter, NullReporter, PlainReporter, Reporter, RunPlan

PLAN = RunPlan(total_steps=10, batch_size=4, examples_per_epoch=16)


class Heard(Reporter):
    def __init__(self, heard, name="", fails_to_close=False):
        self.heard = heard
        self.name = name
        self.fails_to_close = fails_to_close

    def start(self, plan):
        self.heard.append(plan)

    def progress(self, step, record):
        self.heard.append((step, record))

    def record(self, record):
        self.heard.append(record)

    def sync(self):
        self.heard.append("on the disk")

    def close(self, outcome):
        self.heard.append(self.name + outcome)
        if self.fails_to_close:
            raise OSError("disk full")


def test_a_plan_counts_epochs_where_the_size_is_known():
    assert PLAN.epoch(6) == 1.5
    assert RunPlan(total_steps=10, batch_size=4).epoch(6) is None


def test_the_null_reporter_takes_everything():
    reporter = NullReporter()
    reporter.start(PLAN)
    reporter.progress(1, {})
    reporter.record({})
    reporter.sync()
    reporter.close("done")


def test_all_are_told_everything():
    first: list = []
    second: list = []
    reporter = MultiReporter([Heard(first), Heard(second)])
    reporter.start(PLAN)
    reporter.progress(1, {"loss": 2.0})
    reporter.record({"step": 1})
    reporter.sync()
    reporter.close("done")
    assert first == second == [PLAN, (1, {"loss": 2.0}), {"step": 1}, "on the disk", "done"]


def test_all_are_closed_in_order_even_if_one_fails():
    heard: list = []
    reporter = MultiReporter([Heard(heard, "a "), Heard(heard, "b ", fails_to_close=True), Heard(heard, "c ")])
    with pytest.raises(OSError, match="disk full"):
        reporter.close("done")
    assert heard == ["a done", "b done", "c done"]


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
