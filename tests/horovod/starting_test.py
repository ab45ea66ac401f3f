"""The group waits for a late rank, because Horovod's Gloo would abort after its own timeout."""

import sys

import pytest

pytest.importorskip("horovod")

from tfdist.testing import processes

pytestmark = pytest.mark.processes

LATE = """
import os, time
if os.environ["HOROVOD_RANK"] == "1":
    time.sleep(6)
import tfdist.horovod as hvd
hvd.init()
print("rank", hvd.rank(), "of", hvd.size())
"""


def test_a_rank_that_comes_late_is_waited_for():
    command = ["-m", "tfdist.launch", "--processes=2", "--launcher=horovod", "--", sys.executable, "-c", LATE]
    environment = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "2", "TF_NUM_INTRAOP_THREADS": "1"}
    with processes.job([sys.executable, *command], 1, environment) as job:
        [end] = job.wait(300)
    assert end.code == 0, end.output
    assert "rank 0 of 2" in end.output and "rank 1 of 2" in end.output, end.output
