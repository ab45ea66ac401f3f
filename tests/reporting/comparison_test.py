"""The picture of several runs."""

import io

import pytest

from tests.reporting.run_summary_test import RECORDS, write
from tfdist.reporting.comparison import AXES, draw
from tfdist.reporting.run_summary import read_run


@pytest.fixture
def runs(tmp_path):
    write(tmp_path / "_first$", records=RECORDS)
    write(tmp_path / "second", records=[{**record, "loss": 500.0} for record in RECORDS])
    write(tmp_path / "empty", records=[])
    return [read_run(tmp_path / name, name) for name in ("_first$", "second", "empty")]


@pytest.mark.parametrize("axis", AXES)
def test_each_metric_has_a_panel_and_each_run_a_color(runs, axis):
    figure = draw(runs, ["loss", "accuracy", "other"], axis)
    assert figure.get_suptitle() == "Comparison of 3 runs"
    loss, accuracy, other = figure.axes
    assert [panel.get_xlabel() for panel in figure.axes] == [AXES[axis]] * 3
    assert loss.get_ylabel() == "loss (logarithmic)" and accuracy.get_ylabel() == "accuracy"
    assert [text.get_text() for text in other.texts] == ["nothing to draw"]
    [legend] = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [r"first\$", "second", "empty", "training", "evaluation", "best evaluation"]
    first, second = [line for line in accuracy.lines if line.get_marker() == "o"]
    assert first.get_color() != second.get_color()
    best = next(line for line in accuracy.lines if line.get_marker() == "*")
    wanted = {"step": 2, "epoch": 2 / 3, "time": 4 / 60}[axis]
    assert best.get_xydata().tolist() == [[pytest.approx(wanted), 0.75]]
    figure.savefig(io.BytesIO(), format="png")
