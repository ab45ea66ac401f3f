import math

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from tfdist.reporting.curves import CurvesReporter, draw

PNG = b"\x89PNG\r\n\x1a\n"


def points(values):
    return [(10 * (index + 1), value) for index, value in enumerate(values)]


def labels(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def drawn(axes: Axes, line: int) -> list[list[float]]:
    return np.asarray(axes.lines[line].get_xydata()).tolist()


def train(step, **fields):
    return {"kind": "train", "step": step, **fields}


def evaluation(step, **fields):
    return {"kind": "eval", "step": step, **fields}


def test_each_panel_says_what_it_shows():
    loss = {"train": points([2.0, 1.0, 0.5]), "eval": points([0.6])}
    figure = draw({"loss": loss, "accuracy": {"train": points([0.1, 0.5, 0.9]), "eval": points([0.8])}})
    left, right = figure.axes
    assert (left.get_title("left"), right.get_title("left")) == ("Loss", "Metrics")
    assert (left.get_ylabel(), right.get_ylabel()) == ("loss", "accuracy")
    for axes in (left, right):
        assert axes.get_xlabel() == "step (optimizer updates)"
        assert labels(axes) == ["train", "eval"]
    assert drawn(left, 0) == [[10, 2.0], [20, 1.0], [30, 0.5]]
    assert drawn(left, 1) == [[10, 0.6]]
    assert drawn(right, 1) == [[10, 0.8]]


def test_several_metrics_are_named_and_more_than_four_left_out():
    figure = draw({f"m{index}": {"train": points([0.1, 0.2])} for index in range(6)})
    assert labels(figure.axes[1]) == ["m0, train", "m1, train", "m2, train", "m3, train"]
    assert figure.axes[1].get_ylabel() == "value"


@pytest.mark.parametrize(
    ("losses", "scale"), [([100.0, 0.1], "log"), ([2.0, 0.1], "linear"), ([100.0, -0.1], "linear")]
)
def test_the_loss_is_logarithmic_where_it_spans_decades(losses, scale):
    assert draw({"loss": {"train": points(losses)}}).axes[0].get_yscale() == scale


@pytest.mark.parametrize(
    "records",
    [
        [train(1, loss="nan")],
        [train(1, loss=1.0), train(2, loss=math.inf), train(3, loss=-math.inf, accuracy="nan")],
        [evaluation(1, accuracy=1.0)],
        [train(1, **{"$\\cost$": 1.0})],
        [{"step": 1, "loss": 1.0}, {"loss": 1.0}, {"kind": "eval"}],
        [train(1, **{"$\\cost$": 1.0, "_hidden": 2.0})],
    ],
)
def test_missing_and_odd_values_leave_a_picture(tmp_path, records):
    path = tmp_path / "curves.png"
    reporter = CurvesReporter(path)
    for record in records:
        reporter.record(record)
    reporter.close("done")
    assert path.read_bytes().startswith(PNG)


def test_evaluations_draw_but_not_too_often(tmp_path):
    path = tmp_path / "curves.png"
    now = 0.0
    reporter = CurvesReporter(path, seconds_between=10.0, clock=lambda: now)
    reporter.record(train(1, loss=1.0))
    assert not path.exists()
    reporter.record(evaluation(1, loss=1.0))
    first = path.read_bytes()
    now = 9.0
    reporter.record(evaluation(2, loss=0.5))
    assert path.read_bytes() == first
    now = 11.0
    reporter.record(evaluation(3, loss=0.2))
    second = path.read_bytes()
    assert second != first
    reporter.record(evaluation(4, loss=0.1))
    reporter.close("done")
    assert path.read_bytes() not in (first, second)


def test_the_end_draws_what_is_new_only(tmp_path):
    path = tmp_path / "curves.png"
    reporter = CurvesReporter(path)
    reporter.close("done")
    assert not list(tmp_path.iterdir())
    reporter.record(evaluation(10, loss=1.0))
    path.unlink()
    reporter.close("done")
    assert not path.exists()
    reporter.record(train(20, loss=0.5))
    reporter.close("done")
    assert path.exists()


def test_the_best_evaluation_is_marked_and_the_learning_rate_has_a_panel():
    figure = draw(
        {
            "loss": {"train": points([2.0, 1.0]), "eval": points([0.6, 0.5, 0.55, math.nan])},
            "accuracy": {"train": points([0.1, 0.5]), "eval": points([0.8, 0.9, 0.9])},
            "learning_rate": {"train": points([0.1, 0.05])},
        },
        "runs$one",
    )
    loss, accuracy, rate = figure.axes
    assert labels(loss) == ["train", "eval (best 0.5000 at step 20)"]
    assert labels(accuracy) == ["train", "eval (best 0.9000 at step 20)"]
    assert [line.get_marker() for line in accuracy.lines] == ["None", "*", "o"]
    assert drawn(accuracy, 1) == [[20, 0.9]]
    assert (rate.get_title("left"), labels(rate), rate.get_ylim()[0]) == ("Learning rate", [], 0.0)
    assert figure.get_suptitle() == r"runs\$one"


def worker(rate, **waits):
    seconds = {"data": 0.0, "workers": 0.0, "pull": 0.0, "push": 0.0, **waits}
    return {"updates": rate, "updates_per_second": rate / 2, "compute_seconds": 3.0, "wait_seconds": seconds}


def test_the_workers_of_parameter_servers_have_a_row_of_panels(tmp_path):
    reporter = CurvesReporter(tmp_path / "curves.png")
    histogram = [{"0": 10, "5": 2}, {"1": 12}]
    for step in (20, 40):
        workers = [worker(15, workers=1.5), worker(5), worker(0)]
        reporter.record(train(step, loss=1.0, workers=workers, staleness_histogram=histogram))
    panels = {axes.get_title("left"): axes for axes in draw(reporter._curves, "", reporter._worker_panels).axes}
    staleness, rates, times = (panels[title] for title in ("Staleness", "Updates per second", "Time of an update"))
    assert [[bar.get_height() for bar in bars] for bars in staleness.containers] == [[20, 4], [24]]
    assert labels(rates) == ["worker 0", "worker 1", "worker 2"] and drawn(rates, 0) == [[20, 7.5], [40, 7.5]]
    lengths = {bars.get_label(): [round(bar.get_width()) for bar in bars] for bars in times.containers}
    assert lengths["compute"] == [200, 600] and lengths["wait for other workers"] == [100, 0]
    assert [round(bar.get_x()) for bar in times.containers[2]] == [200, 600]  # stacked
    assert [text.get_text() for text in times.get_yticklabels()] == ["worker 0", "worker 1"]
    reporter.close("done")
    assert imread(tmp_path / "curves.png").shape[0] == 1008  # two rows


def test_the_divergence_of_replicas_has_a_panel(tmp_path):
    reporter = CurvesReporter(tmp_path / "curves.png")
    for step in (10, 20):
        reporter.record(train(step, loss=1.0, learning_rate=0.1, replica_divergence=step / 1000))
    _, metrics, rate, divergence = draw(reporter._curves).axes
    assert not metrics.lines
    assert (rate.get_title("left"), divergence.get_title("left")) == ("Learning rate", "Replica divergence")
    assert drawn(divergence, 0) == [[10, 0.01], [20, 0.02]]
    assert (labels(divergence), divergence.get_ylim()[0]) == ([], 0.0)
