"""Predicted timelines: the ideals of emulated stages, and the parts of backward passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipelining.schedules.arbitrary_schedules import any_schedules, durations
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.schedule_simulation import simulate


@pytest.mark.parametrize(
    ("spec", "seconds"), [("gpipe", 3.30), ("1f1b", 3.30), ("interleaved(chunks=2)", 2.85), ("zb_h1", 2.70)]
)
def test_the_ideals_of_four_stages_of_100_and_200_ms(spec, seconds):
    schedule = make_schedule(spec, processes=4, micro_batches=8)
    chunks = schedule.stages // 4
    timeline = simulate(schedule, forward=0.1 / chunks, backward=0.2 / chunks)
    assert timeline.makespan == pytest.approx(seconds)
    assert timeline.busy_seconds == pytest.approx([8 * 0.3] * 4)


@given(any_schedules(), st.data())
def test_each_action_is_after_what_it_needs(schedule, data):
    """Recomputed from the spans alone: nothing overlaps, nothing is early, and nothing waits without a reason."""
    forward, backward = (data.draw(durations(schedule.stages)) for _ in range(2))
    timeline = simulate(schedule, forward=forward, backward=backward)
    ends = {
        (s.action.kind.replace("B", "I"), s.action.stage, s.action.micro_batch): s.end
        for r in timeline.spans
        for s in r
    }
    for row in timeline.spans:
        free = 0.0
        for span in row:
            kind, stage, m = span.action.kind, span.action.stage, span.action.micro_batch
            bounds = [free]
            if kind == "F" and stage:
                bounds.append(ends["F", stage - 1, m])
            if kind in "BI":
                bounds.append(ends["F", stage, m])
            if kind in "BI" and stage + 1 < schedule.stages:
                bounds.append(ends["I", stage + 1, m])
            if kind == "W":
                bounds.append(ends["I", stage, m])
            assert span.start == max(bounds)
            seconds = {"F": forward[stage], "B": backward[stage]}.get(kind, backward[stage] / 2)
            assert span.end == span.start + seconds
            free = span.end


def test_durations_of_the_parts_of_a_backward_pass():
    schedule = make_schedule("zb_h1", processes=1, micro_batches=1)

    def seconds(**given):
        return [span.end - span.start for span in simulate(schedule, forward=1, backward=6, **given).spans[0]]

    assert seconds() == [1, 3, 3]
    assert seconds(weight=2) == [1, 4, 2]
    assert seconds(weight=2, input_gradient=5) == [1, 5, 2]
    assert seconds(weight=[8]) == [1, 0, 8]
