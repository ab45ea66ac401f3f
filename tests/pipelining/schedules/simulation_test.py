"""Predicted timelines: the ideals of emulated stages, the time of messages, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipelining.schedules.arbitrary_schedules import any_schedules, durations
from tfdist.errors import InputError
from tfdist.pipelining.schedule import Action, Schedule
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.schedule_simulation import simulate


@pytest.mark.parametrize("sends", ["eager", "rendezvous"])
@pytest.mark.parametrize(
    ("spec", "seconds"), [("gpipe", 3.30), ("1f1b", 3.30), ("interleaved(chunks=2)", 2.85), ("zb_h1", 2.70)]
)
def test_the_ideals_of_four_stages_of_100_and_200_ms(spec, seconds, sends):
    schedule = make_schedule(spec, processes=4, micro_batches=8)
    chunks = schedule.chunks
    timeline = simulate(schedule, forward=0.1 / chunks, backward=0.2 / chunks, sends=sends)
    assert timeline.makespan == pytest.approx(seconds)
    assert timeline.busy == pytest.approx([8 * 0.3] * 4)


@given(any_schedules(), st.data())
def test_each_action_is_after_what_it_needs(schedule, data):
    """Recomputed from the spans alone: nothing overlaps, nothing is early, and nothing waits without a reason."""
    forward, backward = (data.draw(durations(schedule.stages)) for _ in range(2))
    links = data.draw(durations(schedule.stages - 1))
    timeline = simulate(schedule, forward=forward, backward=backward, message=links)
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
                bounds.append(ends["F", stage - 1, m] + links[stage - 1] * (schedule.processes > 1))
            if kind in "BI":
                bounds.append(ends["F", stage, m])
            if kind in "BI" and stage + 1 < schedule.stages:
                bounds.append(ends["I", stage + 1, m] + links[stage] * (schedule.processes > 1))
            if kind == "W":
                bounds.append(ends["I", stage, m])
            assert span.start == max(bounds)
            seconds = {"F": forward[stage], "B": backward[stage]}.get(kind, backward[stage] / 2)
            assert span.end == span.start + seconds
            free = span.end


def test_messages_take_time():
    schedule = make_schedule("1f1b", processes=2, micro_batches=1)
    spans = simulate(schedule, forward=1, backward=2, message=0.25).spans
    assert [(span.start, span.end) for span in spans[0]] == [(0, 1), (4.5, 6.5)]
    assert [(span.start, span.end) for span in spans[1]] == [(1.25, 2.25), (2.25, 4.25)]
    alone = make_schedule("interleaved(chunks=2)", processes=1, micro_batches=2)
    assert simulate(alone, forward=1, backward=2, message=9).makespan == 12, "no messages within a process"


def test_durations_of_the_parts_of_a_backward_pass():
    schedule = make_schedule("zb_h1", processes=1, micro_batches=1)

    def seconds(**given):
        return [span.end - span.start for span in simulate(schedule, forward=1, backward=6, **given).spans[0]]

    assert seconds() == [1, 3, 3]
    assert seconds(weight=2) == [1, 4, 2]
    assert seconds(weight=2, input_gradient=5) == [1, 5, 2]
    assert seconds(weight=[8]) == [1, 0, 8]


def test_a_blocking_send_costs_time():
    schedule = make_schedule("gpipe", processes=2, micro_batches=4)
    eager, blocking = (
        simulate(schedule, forward=1, backward=2, message=0.5, sends=sends).makespan
        for sends in ("eager", "rendezvous")
    )
    assert (eager, blocking) == (16, 19)


@pytest.mark.parametrize("sends", ["eager", "rendezvous"])
def test_a_cycle_of_actions_is_named(sends):
    rows = ((Action("F", 0, 0), Action("B", 0, 1), Action("F", 0, 1), Action("B", 0, 0)), ())
    with pytest.raises(
        InputError, match="process 0 waits before 0B1 for 0F1 of process 0. Each action must come after"
    ):
        simulate(Schedule("own", 2, 2, 2, rows), forward=1, backward=2, sends=sends)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"forward": -1}, "forward must be a number of seconds of at least 0, or 2 of them. Received: -1."),
        ({"forward": [1, 2, 3]}, "or 2 of them. Received: [1, 2, 3]."),
        ({"backward": float("nan")}, "backward must be a number of seconds"),
        ({"message": [1, 2]}, "message must be a number of seconds of at least 0, or 1 of them. Received: [1, 2]."),
        ({"sends": "lazy"}, "sends must be eager or rendezvous. Received: 'lazy'."),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(InputError, match=re.escape(message)):
        simulate(make_schedule("1f1b", 2, 4), **{"forward": 1, "backward": 2, **given})
