import math
import time

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from tfdist.reporting import RunPlan
from tfdist.reporting.tensorboard import TensorBoardReporter

TRAIN = {"schema": 1, "kind": "train", "step": 10, "time": 1770000000.0, "loss": 0.5, "accuracy": 0.75, "epoch": 1.5}
EVAL = {"schema": 1, "kind": "eval", "step": 10, "time": 1770000001.0, "loss": 0.25, "accuracy": 0.875}


def read(run) -> dict[str, list[tuple[int, float, float]]]:
    """Returns (step, time, value) of each scalar of a run, by tag."""
    events = EventAccumulator(str(run)).Reload()
    return {
        tag: [(e.step, e.wall_time, float(make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def test_training_and_evaluation_are_two_runs_of_one_board(tmp_path):
    reporter = TensorBoardReporter(tmp_path)
    reporter.start(RunPlan(total_steps=10, batch_size=4))
    reporter.progress(5, {"loss": 1.0})
    reporter.record(TRAIN)
    reporter.record({**TRAIN, "step": 20, "loss": 0.25})
    reporter.record(EVAL)
    reporter.close("done")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval", "train"]
    train = read(tmp_path / "train")
    assert train["loss"] == [(10, 1770000000.0, 0.5), (20, 1770000000.0, 0.25)]
    assert set(train) == {"loss", "accuracy", "epoch"}
    assert read(tmp_path / "eval") == {"loss": [(10, 1770000001.0, 0.25)], "accuracy": [(10, 1770000001.0, 0.875)]}


def test_the_staleness_on_each_server_is_a_histogram_with_a_bucket_for_each_age(tmp_path):
    reporter = TensorBoardReporter(tmp_path)
    reporter.record({**TRAIN, "staleness_histogram": [{"0": 5, "3": 2}, {}], "servers": [{"pulled_bytes": 8}, {}]})
    reporter.close("done")
    events = EventAccumulator(str(tmp_path / "train")).Reload()
    [event], [no_updates] = (events.Tensors(f"servers/{number}/staleness") for number in range(2))
    assert make_ndarray(event.tensor_proto)[:, 2].tolist() == [5, 0, 0, 2] and event.step == 10
    assert make_ndarray(no_updates.tensor_proto)[:, 2].sum() == 0
    assert "servers/0/pulled_bytes" in events.Tags()["tensors"]


def test_steps_that_are_made_again_are_shown_once(tmp_path):
    """A run stops after step 10 and resumes from it, twice."""
    for number, first in enumerate((0, 10, 10)):
        time.sleep(1.1 if number else 0.0)  # files are read in the order of their names, which begin with seconds
        reporter = TensorBoardReporter(tmp_path)
        reporter.start(RunPlan(total_steps=40, batch_size=4, first_step=first))
        for step in range(first + 5, 35 - 5 * number, 5):
            reporter.record({**TRAIN, "step": step, "loss": number})
        reporter.record({**EVAL, "step": 20, "loss": number})
        reporter.close("failed")
    shown = {kind: [event[::2] for event in read(tmp_path / kind)["loss"]] for kind in ("train", "eval")}
    assert shown == {"train": [(5, 0), (10, 0), (15, 2), (20, 2)], "eval": [(20, 2)]}


def test_a_record_is_in_the_file_before_the_run_ends(tmp_path):
    reporter = TensorBoardReporter(tmp_path)
    reporter.record(TRAIN)
    assert read(tmp_path / "train")["loss"] == [(10, 1770000000.0, 0.5)]
    reporter.close("killed")


@pytest.mark.parametrize("record", [{"kind": "train", "step": 1}, {"kind": "train", "loss": 1.0}, {"step": 1}, {}])
def test_any_field_may_be_missing(tmp_path, record):
    reporter = TensorBoardReporter(tmp_path)
    reporter.record(record)
    reporter.close("done")


def test_what_is_not_finite_is_written_and_what_is_no_number_is_not(tmp_path):
    reporter = TensorBoardReporter(tmp_path)
    reporter.record({"kind": "train", "step": 1, "time": 1.0, "loss": "nan", "note": "text", "list": [1]})
    reporter.close("the loss is not finite")
    scalars = read(tmp_path / "train")
    assert list(scalars) == ["loss"]
    assert math.isnan(scalars["loss"][0][2])


def test_nothing_recorded_leaves_nothing(tmp_path):
    TensorBoardReporter(tmp_path).close("done")
    assert not list(tmp_path.iterdir())
