"""A pipeline without a flush in the midst of training."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.pipelining.schedules import Span, Timeline, make_schedule, simulate
from tfdist.pipelining.schedules.steady_state import steady_state, steps_until_steady, without_end


@given(st.integers(1, 5), st.integers(1, 6))
def test_equal_stages_are_never_idle(processes, micro_batches):
    schedule = make_schedule("pipedream", processes, micro_batches)
    order = without_end(schedule, steps_until_steady(schedule))
    found = steady_state(simulate(order, forward=1.0, backward=2.0), micro_batches)
    assert found.makespan == pytest.approx(3 * micro_batches)
    assert found.bubble == pytest.approx(0, abs=1e-9)


def test_the_slowest_stage_is_never_idle():
    schedule = make_schedule("2bw", 3, 4)
    order = without_end(schedule, steps_until_steady(schedule))
    found = steady_state(simulate(order, forward=[1.0, 2.0, 1.0], backward=[2.0, 4.0, 2.0]), 4)
    assert found.busy == pytest.approx([12, 24, 12])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_the_order_without_an_end(processes, micro_batches, steps):
    order = without_end(make_schedule("pipedream", processes, micro_batches), steps)
    count = steps * micro_batches
    for process, row in enumerate(order.actions):
        ahead = processes - 1 - process
        alternating = [text for m in range(count) for text in (f"{process}F{ahead + m}", f"{process}B{m}")]
        assert [*map(str, row)] == [f"{process}F{m}" for m in range(ahead)] + alternating


def test_actions_at_the_borders_are_cut():
    [row] = make_schedule("1f1b", 1, 2).actions
    spans = tuple(Span(action, float(i), i + 1.0) for i, action in enumerate(row))
    [found] = Timeline((spans,)).between(0.5, 2.0).spans
    assert [(span.start, span.end) for span in found] == [(0.5, 1.0), (1.0, 2.0)]
