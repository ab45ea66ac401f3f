"""PipeDream: versions of weights are those of its equation, and in the midst of training the slowest stage is never idle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipelining.schedules.arbitrary_schedules import computes_a_batch
from tfdist.errors import InputError
from tfdist.pipelining.schedule import BACKWARD, FORWARD, WEIGHT_GRADIENT, Schedule
from tfdist.pipelining.schedule_catalog import (
    make_schedule,
    order_without_flush,
    pipedream,
    steady_state,
    steps_until_steady,
)
from tfdist.pipelining.timeline import Span, Timeline, simulate


def weight_versions(schedule: Schedule, *, vertical_sync: bool = False) -> dict[tuple[int, int], int]:
    """Returns the number of updates in the weights of a stage that compute a micro-batch, by (stage, micro-batch).

    The update of a stage follows each whole backward pass, "B" or "W". With `vertical_sync`, all use the first stage's version.
    """
    versions = {}
    for row in schedule.actions:
        updates = dict.fromkeys((action.stage for action in row), 0)
        for action in row:
            if action.kind == FORWARD:
                versions[action.stage, action.micro_batch] = updates[action.stage]
            elif action.kind in (BACKWARD, WEIGHT_GRADIENT):
                updates[action.stage] += 1
    return {(v, m): versions[0, m] for v, m in versions} if vertical_sync else versions


@given(st.integers(1, 6), st.integers(1, 20))
def test_weights_are_as_old_as_the_equation_says(processes, micro_batches):
    schedule = pipedream(processes, micro_batches)
    assert computes_a_batch(schedule)
    for (stage, m), version in weight_versions(schedule).items():
        assert version == max(m - (processes - 1 - stage), 0)
    for (_, m), version in weight_versions(schedule, vertical_sync=True).items():
        assert version == max(m - (processes - 1), 0)


@given(st.integers(1, 6), st.integers(1, 20))
def test_delays_are_those_of_the_order_without_a_flush(processes, micro_batches):
    """A batch uses the newest weights at its first forward pass: that in its stage or, with vertical sync, in the first one."""
    steps = 8
    unending = pipedream(processes, steps * micro_batches)
    for vertical_sync in (False, True):
        schedule = make_schedule(f"pipedream(vertical_sync={vertical_sync})", processes, micro_batches)
        assert not schedule.has_flush
        versions = weight_versions(unending, vertical_sync=vertical_sync)
        for stage, delay in enumerate(schedule.delays):
            for step in range(steps):
                updates = versions[stage, step * micro_batches] // micro_batches
                assert updates == max(step - delay, 0)


@pytest.mark.parametrize(("processes", "micro_batches"), [(2, 1), (3, 2), (4, 3), (4, 8)])
def test_2bw_is_pipedream_with_vertical_sync(processes, micro_batches):
    schedule = make_schedule("2bw", processes, micro_batches)
    assert schedule.delays == (1,) * processes
    assert schedule.delays == pipedream(processes, micro_batches, vertical_sync=True).delays


def test_2bw_needs_micro_batches():
    with pytest.raises(InputError, match="2bw needs at least 3 micro-batches, .* Received: 2"):
        make_schedule("2bw", 4, 2)


def test_micro_batches_of_later_steps_are_live():
    assert make_schedule("pipedream", 4, 1).live_activations() == (4, 3, 2, 1)
    assert make_schedule("1f1b", 4, 1).live_activations() == (1, 1, 1, 1)


@given(st.integers(1, 5), st.integers(1, 6))
def test_equal_stages_are_never_idle(processes, micro_batches):
    schedule = make_schedule("pipedream", processes, micro_batches)
    order = order_without_flush(schedule, steps_until_steady(schedule))
    found = steady_state(simulate(order, forward=1.0, backward=2.0), micro_batches)
    assert found.makespan == pytest.approx(3 * micro_batches)
    assert found.bubble == pytest.approx(0, abs=1e-9)


def test_the_slowest_stage_is_never_idle():
    schedule = make_schedule("2bw", 3, 4)
    order = order_without_flush(schedule, steps_until_steady(schedule))
    found = steady_state(simulate(order, forward=[1.0, 2.0, 1.0], backward=[2.0, 4.0, 2.0]), 4)
    assert found.busy_seconds == pytest.approx([12, 24, 12])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_the_order_without_an_end(processes, micro_batches, steps):
    order = order_without_flush(make_schedule("pipedream", processes, micro_batches), steps)
    count = steps * micro_batches
    for process, row in enumerate(order.actions):
        ahead = processes - 1 - process
        alternating = [text for m in range(count) for text in (f"{process}F{ahead + m}", f"{process}B{m}")]
        assert [*map(str, row)] == [f"{process}F{m}" for m in range(ahead)] + alternating


def test_actions_at_the_borders_are_cut():
    [row] = make_schedule("1f1b", 1, 2).actions
    spans = tuple(Span(action, float(i), i + 1.0) for i, action in enumerate(row))
    [found] = Timeline((spans,)).clip(0.5, 2.0).spans
    assert [(span.start, span.end) for span in found] == [(0.5, 1.0), (1.0, 2.0)]
