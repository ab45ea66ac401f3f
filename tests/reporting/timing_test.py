import pytest

from tfdist.reporting.timing import StepTimer, compare_ranks, cost_of_slowest


def clock(*seconds: float):
    return iter(seconds).__next__


def called(timer: StepTimer, steps: int, **measured: float) -> None:
    with timer.call(steps=steps):
        pass
    timer.add_inner_times(**measured)


def test_a_window_is_the_mean_over_its_steps():
    timer = StepTimer(batch_size=32, clock=clock(0.0, 2.0, 10.0, 16.0))
    called(timer, 3, wait_seconds=0.5, busy_seconds=1.0)
    called(timer, 1, wait_seconds=1.5, busy_seconds=1.0)
    assert timer.own_seconds == 1.0
    expected = {"step_seconds": 2.0, "data_wait_seconds": 0.5, "examples_per_second": 16.0}
    assert timer.fields() == expected
    assert timer.window() == expected


def test_a_window_begins_where_the_last_ended():
    timer = StepTimer(batch_size=8, clock=clock(0.0, 4.0, 4.0, 5.0))
    called(timer, 1, wait_seconds=3.0, busy_seconds=1.0)
    timer.window()
    called(timer, 2, wait_seconds=0.0, busy_seconds=0.5)
    assert timer.own_seconds == 0.25
    assert timer.window() == {"step_seconds": 0.5, "data_wait_seconds": 0.0, "examples_per_second": 16.0}


def test_nothing_measured_is_nothing_said():
    timer = StepTimer(batch_size=8, clock=clock())
    assert timer.window() == {}
    assert timer.own_seconds is None


def test_without_a_clock_on_the_devices_a_process_has_no_time_of_its_own():
    timer = StepTimer(batch_size=8, clock=clock(0.0, 1.0))
    called(timer, 1, wait_seconds=0.5, busy_seconds=0.0)
    assert timer.own_seconds is None


def test_a_clock_too_coarse_for_the_call_gives_no_rate():
    timer = StepTimer(batch_size=8, clock=clock(1.0, 1.0))
    with timer.call(steps=1):
        pass
    assert timer.window() == {"step_seconds": 0.0, "data_wait_seconds": 0.0}


def test_a_call_that_fails_does_not_count():
    timer = StepTimer(batch_size=8, clock=clock(0.0, 9.0))
    with pytest.raises(RuntimeError), timer.call(steps=1):
        raise RuntimeError
    assert timer.window() == {}


@pytest.mark.parametrize(
    ("seconds", "low", "high", "slowest"),
    [([0.2], 0.2, 0.2, 0), ([0.2, 0.4, 0.1], 0.1, 0.4, 1), ([0.2, 0.2], 0.2, 0.2, 0), ([None, 0.3], 0.3, 0.3, 1)],
)
def test_ranks_are_compared(seconds, low, high, slowest):
    assert compare_ranks(seconds) == {"step_seconds_min": low, "step_seconds_max": high, "slowest_rank": slowest}


@pytest.mark.parametrize("seconds", [[], [None, None]])
def test_ranks_without_a_time_are_not_compared(seconds):
    assert compare_ranks(seconds) == {}


@pytest.mark.parametrize(
    ("seconds", "cost"),
    [([0.2, 0.4], 0.4), ([0.4, 0.2, 0.1], 0.5), ([0.2, 0.2], 0.0), ([0.2], None), ([None, 0.3], None), ([], None)],
)
def test_the_slowest_rank_costs_what_the_others_wait(seconds, cost):
    assert cost_of_slowest(seconds, 0.5) == (None if cost is None else pytest.approx(cost))
