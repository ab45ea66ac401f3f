"""Pictures of timelines: a box for each action, in its process's row, on one axis of time."""

import io

import pytest
from matplotlib.image import imread

from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.schedule_simulation import simulate
from tfdist.pipelining.timeline import draw, png


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


def test_the_picture_is_a_png_file():
    assert imread(io.BytesIO(png({"1f1b": timeline(forward=0.001, backward=0.002)}))).shape[1] == 1440
