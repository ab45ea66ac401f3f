"""Data in Keras's forms on two processes: one device's result, or one line if the processes read different data."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests import processes

pytestmark = pytest.mark.processes

WORKER = str(pathlib.Path(__file__).parent / "batches_worker.py")


def said(output):
    return dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)


def test_processes_give_one_devices_result_or_refuse_data_that_differs():
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    alone = subprocess.run([sys.executable, WORKER, "single"], capture_output=True, text=True, timeout=300, env=quiet)
    expected = said(alone.stdout)
    for output in processes.finish([sys.executable, WORKER, "multiworker"], 2):
        found = said(output)
        for name in ("PyDataset", "seeded", "in order"):
            numbers = [[float(number) for number in text.split()] for text in (found[name], expected[name])]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-9), name
        for name in ("shuffled", "examples shuffled", "sharded", "validated by shards"):
            assert found[name].startswith("Every process must read the same batches in the same order"), found[name]
