"""The timeline of a pipeline: measured in a run on request, which changes nothing else, and drawn next to a prediction."""

import json
import pathlib
import re
import sys

import pytest
from matplotlib.image import imread

from tests import processes
from tests.selection import quick
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.timeline import Span, Timeline, simulate
from tfdist.trainer.pipeline_timeline import expected_timeline


def test_the_expected_timeline_has_the_median_durations():
    schedule = make_schedule("1f1b", 2, 4)
    ideal = simulate(schedule, forward=[1.0, 2.0], backward=[2.0, 4.0])
    late = [[Span(span.action, span.start + 5, span.end + 5) for span in row] for row in ideal.spans]
    late[0][1] = late[0][1]._replace(end=late[0][1].end + 50)  # one action that was interrupted
    found = expected_timeline(schedule, Timeline(tuple(map(tuple, late))))
    assert found == ideal


def test_the_parts_of_backward_passes_have_their_own_durations():
    schedule = make_schedule("zb_h1", 2, 4)
    ideal = simulate(schedule, forward=1.0, backward=3.0, input_gradient=1.5, weight=1.0)
    assert expected_timeline(schedule, ideal) == ideal


def losses(directory):
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.mark.processes
@pytest.mark.parametrize("schedule", quick(["1f1b", "pipedream"], "1f1b"))
def test_a_run_draws_its_timeline(schedule: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = (
        "--strategy=pipeline",
        f"--pipeline_schedule={schedule}",
        "--micro_batches=4",
        "--model=mlp",
        "--dataset=digits",
        "--batch_size=32",
    )
    command = [sys.executable, "-m", "tfdist.train", *flags, "--steps=4", "--log_every=1"]
    for extra in (("--output_dir=plain",), ("--output_dir=drawn", "--profile_steps=2:3")):
        output, _ = processes.finish([*command, *extra], 2)
    assert losses(tmp_path / "drawn") == losses(tmp_path / "plain")
    assert not (tmp_path / "plain" / "timeline.png").exists()
    assert imread(tmp_path / "drawn" / "timeline.png").shape[1] == 1440
    line = rf"Timeline of {schedule} at step 2: \S+ s, \d+% idle; predicted without communication and delays: \S+ s"
    assert re.search(line, output), output
