"""Timelines: predicted ones start each action when what it needs is there; pictures have a box for each action."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipelining.schedules.arbitrary_schedules import any_schedules, durations
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.timeline import draw, simulate


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


def timeline(spec="1f1b", processes=4, **durations):
    return simulate(make_schedule(spec, processes, 8), **{"forward": 0.1, "backward": 0.2, **durations})


def test_each_action_is_a_box_with_its_micro_batch():
    figure = draw({"1f1b, predicted": timeline()})
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "1f1b, predicted: 3.3 s, bubble 27.3%"
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"process {i}" for i in range(4)]
    boxes = [box for box in axes.patches if box.get_width() < 1]
    assert len(boxes) == len(axes.texts) == 4 * 16
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "backward", "idle"]


def test_predicted_and_measured_share_the_axis_of_time():
    figure = draw({"predicted": timeline(), "measured": timeline(forward=0.2)})
    assert [axes.get_xlim() for axes in figure.axes] == [pytest.approx((0, 0.4 * 11))] * 2


def test_chunks_and_parts_have_colors_of_their_own():
    figure = draw({"a": timeline("interleaved(chunks=2)"), "b": timeline("zb_h1")})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "forward",
        "backward",
        "gradient of the input",
        "gradient of the weights",
        "lighter: later chunks",
        "idle",
    ]
    colors = [{box.get_facecolor() for box in axes.patches} for axes in figure.axes]
    assert [len(found) for found in colors] == [5, 4], "two kinds of two chunks, and three kinds, besides idle time"
