"""Weights that must be equal are so, although each process has drawn its own, and those of other stages cannot be read.

Over Horovod, as `tests/strategies/pipeline_test.py` has replicas over TensorFlow only.
"""

import json
import pathlib
import sys

import keras
import pytest

from tests import processes


@pytest.mark.processes
def test_replicas_and_stages_begin_with_equal_weights(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.keras"
    launch = [
        sys.executable,
        "-m",
        "tfdist.launch",
        "--processes=4",
        "--launcher=horovod",
        f"--log_dir={tmp_path}",
        "--",
    ]
    with processes.job([*launch, sys.executable, "-m", "tests.pipelining.equal_values_worker", str(file)], 1) as job:
        [end] = job.wait(300)
    assert end.code == 0, end.output
    logs = [(tmp_path / f"rank-{rank}.log").read_text().splitlines() for rank in range(4)]
    lines = ([line for line in log if line.startswith('{"before')] for log in logs)
    first, second, third, fourth = (json.loads(found[-1]) for found in lines)
    for when in ("before", "after"):
        assert first[when] == second[when] and third[when] == fourth[when]  # replicas of a stage
        shared = first[when].keys() & third[when].keys()
        assert len(shared) == 1
        assert all(first[when][path] == third[when][path] for path in shared)
    assert first["before"] != first["after"]
    assert "has the weights of its own stages only" in first["other"]
    assert len(keras.models.load_model(file).variables) > len(first["before"])
