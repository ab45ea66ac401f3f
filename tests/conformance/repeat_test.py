"""Runs repeat bit for bit: at three ranks, where the order of arrival could change the order of summation."""

import pathlib
import sys

import pytest

from tests import processes

pytestmark = pytest.mark.alone

REPEATS = 30


def test_three_horovod_ranks_repeat_bitwise(tmp_path: pathlib.Path) -> None:
    worker = pathlib.Path(__file__).with_name("repeat_worker.py")
    command = [sys.executable, str(worker), str(REPEATS), str(tmp_path), "{rank}"]
    with processes.job(command, 3) as job:
        failed = [end.output for end in job.wait(180) if end.code]
    assert not failed, "\n".join(failed)
    digests = [digest for rank in range(3) for digest in (tmp_path / f"{rank}.txt").read_text().split()]
    assert len(digests) == 3 * REPEATS
    assert len(set(digests)) == 1
