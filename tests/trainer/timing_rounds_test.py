"""Calls that take turns on processes, and the times that count."""

import pytest

from tfdist.trainer import inspections as timing_rounds
from tfdist.trainer.inspections import TimingRounds, medians_of_slowest


@pytest.fixture
def log(monkeypatch):
    """The calls of a round in order; none takes any time."""
    calls = []
    monkeypatch.setattr(timing_rounds, "seconds_of", lambda call: call() or 1.0)
    return calls


def rounds_of(log, *names):
    calls = {name: lambda name=name: log.append(name) for name in names}
    return TimingRounds(calls, lambda: log.append("together"), reference="a")


def test_each_call_begins_together_and_the_order_alternates(log):
    timing = rounds_of(log, "a", "b")
    timing.run(2)
    assert log == ["together", "a", "together", "b", "together", "b", "together", "a"]
    timing.run(3)
    assert timing.times == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_what_is_slower_is_dropped_and_stays_slower(log):
    timing = rounds_of(log, "a", "b", "c")
    timing.run(1)
    timing.drop({"a": 9.0, "b": 2.0, "c": 5.0}, limit=2.0)
    log.clear()
    timing.run(2)
    assert "c" not in log and "a" in log
    assert timing.correct({"a": 9.0, "b": 6.0, "c": 5.0}) == {"a": 9.0, "b": 6.0, "c": 12.0}


def test_a_round_takes_as_long_as_on_its_slowest_process():
    of_processes = [{"a": [1.0, 9.0, 2.0], "b": [4.0]}, {"a": [3.0, 2.0, 2.5], "b": [3.0]}]
    assert medians_of_slowest(of_processes) == {"a": 3.0, "b": 4.0}
