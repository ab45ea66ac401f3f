"""Weights that must be equal are so, although each process has drawn its own, and those of other stages cannot be read."""

import json
import pathlib
import sys

import keras
import pytest

from tests import processes


@pytest.mark.processes
def test_replicas_and_stages_begin_with_equal_weights(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.keras"
    with processes.job([sys.executable, "-m", "tests.pipelining.equal_values_worker", str(file)], 4) as job:
        ended = job.wait(200)
    assert [end.code for end in ended] == [0] * 4, "\n".join(end.output for end in ended)
    lines = ([line for line in end.output.splitlines() if line.startswith('{"before')] for end in ended)
    first, second, third, fourth = (json.loads(found[-1]) for found in lines)
    for when in ("before", "after"):
        assert first[when] == second[when] and third[when] == fourth[when]  # replicas of a stage
        shared = first[when].keys() & third[when].keys()
        assert len(shared) == 1
        assert all(first[when][path] == third[when][path] for path in shared)
    assert first["before"] != first["after"]
    assert "has the weights of its own stages only" in first["other"]
    assert len(keras.models.load_model(file).variables) > len(first["before"])
