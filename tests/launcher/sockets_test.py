"""The sockets at which a job on one host listens: the table of docs/guides/security.md."""

import errno
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile

import pytest

from tests import processes
from tfdist import launch
from tfdist.errors import InputError

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


# Each row with and without --isolate; `make test` has both for each launcher.
ROWS = [(row, isolated) for row in TABLE for isolated in (False, True)]
QUICK_ROWS = list(zip(TABLE, (False, True, True, False), strict=True))


@pytest.mark.parametrize(
    ("launcher", "strategy", "options", "isolated"),
    [
        pytest.param(*row, isolated, marks=[pytest.mark.full] * ((row, isolated) not in QUICK_ROWS))
        for row, isolated in ROWS
    ],
)
def test_a_job_on_one_host_listens_where_the_table_says(
    launcher: str, strategy: str, options: str, isolated: bool, tmp_path: pathlib.Path
) -> None:
    flags = [f"--launcher={launcher}", *["--isolate"] * isolated]
    with processes.job([*job(tmp_path, *flags), "-c", PROGRAM, strategy, options], 1) as started:
        [end] = started.wait(300)
    assert end.code == 0, end.output
    found = [json.loads(text) for text in re.findall(r"^\[\d\] listening (.*)$", end.output, re.MULTILINE)]
    assert found == [list(TABLE[launcher, strategy, options])] * 2
    assert ("on every network interface" in end.output) == (launcher == "tensorflow" and not isolated)


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


SERVER = """
import json, os, socket
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
with socket.create_server(("127.0.0.1", 0)) as server:
    print("port", server.getsockname()[1], "of rank", rank, flush=True)
    server.settimeout(60)
    server.accept()
"""


@pytest.mark.parametrize("isolated", [False, True])
def test_nobody_outside_reaches_the_ports_of_an_isolated_job(isolated: bool, tmp_path: pathlib.Path) -> None:
    with processes.job([*job(tmp_path, *["--isolate"] * isolated), "-c", SERVER], 1) as started:
        started.wait_for(0, "of rank 0", 60)
        started.wait_for(0, "of rank 1", 60)
        ports = [int(port) for port in re.findall(r"port (\d+) of rank", started.output(0))]
        assert len(ports) == 2
        for port in ports:
            with socket.socket() as client:
                found = client.connect_ex(("127.0.0.1", port))
            assert found == (errno.ECONNREFUSED if isolated else 0)


ENTERED = """
import ctypes, encodings.idna, os, socket, sys
from tfdist import launch
user = int(sys.argv[1])
if user != os.getuid():  # only after the import, because the user may have no access to the interpreter's files
    os.setgroups([]), os.setgid(user), os.setuid(user)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which a change of the user resets
launch.enter()
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
open(os.path.join(sys.argv[2], "file"), "w").close()
print(os.getuid(), os.getgid(), "eth0" in dict(map(reversed, socket.if_nameindex())))
"""


@pytest.mark.parametrize("user", [0, 65534])
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_user_keeps_its_id(user: int) -> None:
    """Also without the rights of root, by a user namespace."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        done = subprocess.run([sys.executable, "-c", ENTERED, str(user), folder], capture_output=True, text=True)
        if "which this system does not permit" in done.stderr:
            pytest.skip(done.stderr.splitlines()[-1])
        assert done.stdout == f"{user} {user} False\n", done.stderr
        assert os.stat(os.path.join(folder, "file")).st_uid == user


def test_what_the_system_does_not_permit_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(namespaces: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(launch, "_unshare", refused)
    with pytest.raises(InputError, match=r"--isolate needs a network namespace.*Received: Operation not permitted\."):
        launch.enter()
