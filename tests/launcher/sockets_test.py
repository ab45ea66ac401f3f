"""The sockets at which a job on one host listens: the table of docs/guides/security.md."""

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
    ("horovod", "horovod", '{"communication": "mpi"}'): (LOOPBACK, LOOPBACK * 2),
}


def job(directory: pathlib.Path, *flags: str) -> list[str]:
    """Returns the command of a job with two processes."""
    return [
        sys.executable,
        "-m",
        "tfdist.launch",
        "--processes=2",
        f"--log_dir={directory}",
        *flags,
        "--",
        sys.executable,
    ]


@pytest.mark.parametrize(("launcher", "strategy", "options"), TABLE)
def test_a_job_on_one_host_listens_where_the_table_says(
    launcher: str, strategy: str, options: str, tmp_path: pathlib.Path
) -> None:
    with processes.job([*job(tmp_path, f"--launcher={launcher}"), "-c", PROGRAM, strategy, options], 1) as started:
        [end] = started.wait(300)
    assert end.code == 0, end.output
    found = [json.loads(text) for text in re.findall(r"^\[\d\] listening (.*)$", end.output, re.MULTILINE)]
    assert found == [list(TABLE[launcher, strategy, options])] * 2
    assert ("on every network interface" in end.output) == (launcher == "tensorflow")


ELASTIC = """
import psutil, tfdist.horovod as hvd
hvd.init()
@hvd.elastic.run
def train(state):
    found = [c.laddr.ip for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    print("listening at", found, flush=True)
train(hvd.elastic.ObjectState(batch=0))
"""


def test_an_elastic_function_listens_nowhere_if_no_launcher_would_tell_it_of_hosts(tmp_path: pathlib.Path) -> None:
    """Horovod's own service would listen on every interface, and unpickle what it hears."""
    with processes.job([*job(tmp_path, "--launcher=horovod"), "-c", ELASTIC], 1) as started:
        [end] = started.wait(300)
    assert end.code == 0, end.output
    assert re.findall(r"^\[\d\] listening at (.*)$", end.output, re.MULTILINE) == ["[]", "[]"]
