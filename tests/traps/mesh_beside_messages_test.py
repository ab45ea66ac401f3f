"""Meshes of DTensor in processes that exchange messages of TensorFlow and Horovod, for pipelines with a model axis."""

import json
import pathlib
import sys
from typing import Any

import pytest

from tests import jobs as processes

pytestmark = [pytest.mark.processes, pytest.mark.full]

WORKER = pathlib.Path(__file__).with_name("mesh_beside_messages_worker.py")
RIGHT = [{"error": "", "mine": a, "received": b, "again": a} for a, b in ((8.0, 64.0), (64.0, 8.0))]


def outcomes(strategy: str, kind: str) -> list[dict[str, Any]]:
    """Returns what each rank printed."""
    with processes.job([sys.executable, str(WORKER), strategy, kind], 2) as job:
        ended = job.wait(300)
    lines = [[line for line in end.output.splitlines() if line.startswith('{"')] for end in ended]
    assert all(lines), "\n".join(end.output for end in ended)
    return [json.loads(found[-1]) for found in lines]


def test_a_mesh_beside_horovod() -> None:
    """Guards: each process of Horovod may have a mesh of its own devices, with a program of its own."""
    assert outcomes("horovod", "own") == RIGHT


def test_a_row_of_a_shared_mesh_beside_tensorflows_messages() -> None:
    """Guards: a process may compute on its row of a mesh of all processes, while others run other programs.

    The key of a group of devices is the number of its row, plus 2048 for each further way to form groups of a mesh. It must
    not be one of tf.distribute's keys, which count from 1 upwards unless `_collective_key_base` is set.
    """
    assert outcomes("multiworker", "shared") == RIGHT


def test_own_meshes_of_two_processes_have_the_same_keys() -> None:
    """Guards: with TensorFlow's servers, the first process decides for all which devices have a group key.

    Both processes would use key 0 for their own devices, whatever the names of their meshes and the numbers of devices.
    """
    errors = [rank["error"] for rank in outcomes("multiworker", "own")]
    assert any("is joining a group that is already full" in error for error in errors), errors
