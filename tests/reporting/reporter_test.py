import pytest

from tfdist.reporting import MultiReporter, NullReporter, Reporter, RunPlan

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
