"""Timings of calls: every call is made, one after another, and the slowest process determines the time."""

import time

import pytest
import tensorflow as tf

from tfdist.planning import benchmark_timing
from tfdist.planning.benchmark_timing import OPERATIONS

PAUSE = 0.02


@pytest.mark.parametrize("name", OPERATIONS)
def test_measures(name, mirrored2):
    one = benchmark_timing.measure(mirrored2, name, 64, tf.float32, repeats=3, repeat_seconds=0.001)
    assert (one.operation, one.strategy, one.replicas, one.dtype) == (name, "mirrored", 2, "float32")
    assert one.bytes == (0 if name == "barrier" else 64)
    assert len(one.seconds) == 3
    assert 1 <= one.calls <= benchmark_timing.MAX_CALLS
    assert all(0 < seconds < 60 for seconds in one.seconds)


@pytest.fixture
def slow(monkeypatch):
    """Delays the all-reduce of one of two replicas by `PAUSE`, and counts the calls."""
    made = []

    def pause(x):
        made.append(1)
        time.sleep(PAUSE)
        return x

    def call(collectives, tensor, name):
        (total,) = collectives.all_reduce([tensor], name=name)
        slowed = tf.py_function(pause, [total], total.dtype)
        slowed.set_shape(total.shape)
        return slowed

    monkeypatch.setitem(benchmark_timing.OPERATIONS, "all_reduce", OPERATIONS["all_reduce"]._replace(call=call))
    return made


def test_calls_follow_each_other(slow, mirrored2):
    loop = benchmark_timing.compiled_loop(mirrored2, "all_reduce", 4, tf.float32)
    loop(tf.constant(1))
    slow.clear()
    assert float(loop(tf.constant(3))) >= 3 * PAUSE
    assert len(slow) == 2 * (1 + 3), "on two replicas, one ahead and three that count"


@pytest.mark.parametrize(("seconds", "calls"), [(2.5 * PAUSE, 3), (0.0, 1), (1e6, benchmark_timing.MAX_CALLS)])
def test_there_are_as_many_calls_as_the_time_asks_for(seconds, calls, mirrored2, monkeypatch):
    monkeypatch.setattr(benchmark_timing, "compiled_loop", lambda *_: lambda calls: PAUSE * int(calls))
    one = benchmark_timing.measure(mirrored2, "all_reduce", 4, tf.float32, repeats=2, repeat_seconds=seconds)
    assert one.calls == calls
    assert one.seconds == pytest.approx((PAUSE, PAUSE))


def test_all_processes_take_the_slowest_one_s_time(mirrored2, monkeypatch):
    def gather(name, value, deadline):
        return [value, [10.0] * len(value)]

    monkeypatch.setattr(mirrored2.group, "gather", gather)
    one = benchmark_timing.measure(mirrored2, "barrier", 0, tf.float32, repeats=2, repeat_seconds=1.0)
    assert (one.calls, one.seconds) == (1, (10.0, 10.0))
