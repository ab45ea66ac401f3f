"""Runs are reproducible bit for bit, with three ranks, where the order of arrival could change the order of summation."""

import pathlib

import pytest

from tests.workers import running

pytestmark = pytest.mark.processes

REPEATS = 30


@pytest.mark.parametrize("communication", ["gloo", pytest.param("mpi", marks=pytest.mark.full)])
def test_three_horovod_ranks_repeat_bitwise(communication: str, tmp_path: pathlib.Path) -> None:
    ranks = running.outcomes("repeat", f"horovod({communication=})", 3, tmp_path, str(REPEATS), seconds=300)
    digests = [digest for rank in ranks for digest in rank]
    assert len(digests) == 3 * REPEATS
    assert len(set(digests)) == 1
