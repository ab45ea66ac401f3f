"""The limit after which late ranks drop micro-steps, and what records and the log say of the rows that are left out."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.step.running_metrics import RunningMetrics
from tfdist.trainer.drop_limit import LEAST_GAIN, MOST_DROPPED, fastest_limit
from tfdist.trainer.dropped_rows import DroppedRows, fields_of


def ends(seconds) -> np.ndarray:
    return np.cumsum(np.asarray(seconds, float), axis=-1)


def simulated(times: np.ndarray, other: float, limit: float) -> tuple[int, float]:
    """Returns the micro-steps and the seconds of all steps with a limit, as ranks would compute them one by one."""
    computed, seconds = 0, 0.0
    for ranks in times:
        slowest = 0.0
        for micro_steps in ranks:
            count, now = 0, 0.0
            while count < len(micro_steps) and (count == 0 or now < limit):
                now, count = micro_steps[count], count + 1
            computed, slowest = computed + count, max(slowest, now)
        seconds += slowest + other
    return computed, seconds


def test_a_step_that_is_rarely_late_ends_early():
    seconds = np.full((100, 4, 4), 0.1)
    seconds[::10, 2] = 1.0  # in a tenth of the steps, one rank takes 4 instead of 0.4 s
    found = fastest_limit(ends(seconds), other=0.1)
    assert found is not None
    assert found.seconds == 1.0, "the largest of the limits that gain equally much"
    assert found.dropped == pytest.approx(30 / 1600)
    computed, total = simulated(ends(seconds), 0.1, found.seconds)
    assert found.gain == pytest.approx((computed / total) / (1600 / (90 * 0.5 + 10 * 4.1)) - 1)


@pytest.mark.parametrize(
    "seconds",
    [
        np.full((20, 4, 4), 0.1),  # all are equal
        np.full((20, 4, 4), 0.1) * [[[1], [1], [1], [1.02]]],  # hardly late
        np.full((20, 2, 4), 0.1) * [[[1], [4]]],  # always late: all of its rows would have to be dropped
    ],
)
def test_nothing_is_dropped_that_gains_nothing_or_costs_too_much(seconds):
    assert fastest_limit(ends(seconds), other=0.1) is None


@given(st.lists(st.floats(0.01, 10), min_size=2 * 2 * 3, max_size=2 * 2 * 3), st.floats(0, 5))
def test_no_other_limit_is_much_faster(seconds, other):
    times = ends(np.reshape(seconds, (2, 2, 3)))
    found = fastest_limit(times, other)
    whole = 12 / simulated(times, other, np.inf)[1]
    speeds = {}
    for limit in {float(x) for x in itertools.chain(times.flat)}:
        computed, total = simulated(times, other, limit)
        speeds[limit] = (computed / total / whole - 1, 1 - computed / 12)
    allowed = [gain for gain, dropped in speeds.values() if dropped <= MOST_DROPPED and gain >= LEAST_GAIN + 1e-9]
    if found is None:
        assert not allowed
    else:
        assert found.gain >= 0.9 * max([*allowed, found.gain]) - 1e-9
        assert found.gain == pytest.approx(speeds[found.seconds][0])


NONE = np.zeros([2, 3], np.int64)


def counts(rank: int, rows: int) -> np.ndarray:
    found = NONE.copy()
    found[:, rank] = rows, rows // 4
    return found


def test_fields():
    assert fields_of(np.zeros([2, 0])) == {}
    assert fields_of(NONE) == {"dropped_rows": 0, "dropped_micro_steps": 0}
    both = counts(2, 12) + counts(1, 8)
    assert fields_of(both) == {"dropped_rows": 20, "dropped_micro_steps": 5, "dropped_rank": 2}


def test_a_rank_is_named_at_first_and_when_its_rows_have_doubled():
    rows = DroppedRows(10, 100)
    assert rows.observe(NONE, 20) is None
    assert rows.observe(counts(1, 8), 30) == "Rows dropped by step 30: rank 1 8 (2 micro-steps); 0.4% of all."
    assert rows.observe(counts(1, 4), 40) is None
    assert rows.observe(counts(1, 4) + counts(2, 4), 50) == (
        "Rows dropped by step 50: rank 1 16 (4 micro-steps), rank 2 4 (1 micro-step); 0.5% of all."
    )


def test_a_limit_that_drops_most_rows_is_too_small():
    found = DroppedRows(0, 100).observe(counts(0, 600), 10)
    assert found.endswith("60.0% of all. Most rows are dropped: use a larger limit.")


def test_counts_are_kept_in_checkpoints_also_for_more_ranks():
    running = RunningMetrics()
    running.drop(counts(1, 8))
    resumed = RunningMetrics(running.to_json())
    resumed.drop(np.ones([2, 4], np.int64))
    assert resumed.dropped.tolist() == [[1, 9, 1, 1], [1, 3, 1, 1]]
    assert "dropped" not in RunningMetrics().to_json()
