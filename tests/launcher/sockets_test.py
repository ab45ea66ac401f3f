"""The sockets at which a job on one host listens: the table of BUILD.md, Network security."""

import json
import pathlib
import re
import sys

import pytest

from tests import processes

pytestmark = pytest.mark.processes

PROGRAM = """
import json, sys
import psutil, tfdist
def listening(process):
    return [c.laddr.ip for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
strategy = tfdist.load_strategy(sys.argv[1], **json.loads(sys.argv[2]))
strategy.group.barrier("all listen")
print("listening", json.dumps([listening(psutil.Process()), listening(psutil.Process().parent())]), flush=True)
strategy.group.barrier("all are seen")
"""
EVERYWHERE, LOOPBACK = ["::"], ["127.0.0.1"]
# By launcher and strategy: the interfaces of each rank's sockets, and of the launcher's.
TABLE = {
    ("tensorflow", "multiworker", "{}"): (EVERYWHERE, LOOPBACK),
    ("tensorflow", "mesh", '{"mesh_shape": "data:2"}'): (EVERYWHERE, LOOPBACK),
    ("horovod", "horovod", "{}"): ([], LOOPBACK * 2),
}


@pytest.mark.parametrize(("launcher", "strategy", "options"), TABLE)
def test_a_job_on_one_host_listens_where_the_table_says(launcher, strategy, options, tmp_path: pathlib.Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tfdist.launch",
        f"--launcher={launcher}",
        "--processes=2",
        f"--log_dir={tmp_path}",
    ]
    command += ["--", sys.executable, "-c", PROGRAM, strategy, options]
    with processes.job(command, 1) as job:
        [end] = job.wait(120)
    assert end.code == 0, end.output
    found = [json.loads(text) for text in re.findall(r"^\[\d\] listening (.*)$", end.output, re.MULTILINE)]
    assert found == [list(TABLE[launcher, strategy, options])] * 2
