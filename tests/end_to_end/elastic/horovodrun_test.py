"""Elastic jobs of Horovod's own launcher, with scripts that use the drop-in import."""

import json
import os
import pathlib
import re
import shutil
import socket
import sys
import time

import psutil
import pytest

from tests import jobs as processes
from tfdist.errors import InputError

pytest.importorskip("horovod")

pytestmark = [pytest.mark.processes, pytest.mark.full]

WORKER = pathlib.Path(__file__).with_name("horovodrun_worker.py")
ENVIRONMENT = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
DEADLINE_SECONDS = 300.0


def horovodrun() -> str:
    found = shutil.which("horovodrun", path=os.path.dirname(sys.executable))
    assert found, "Horovod is installed without its command"
    return found


def test_a_job_that_starts_with_one_rank_grows(tmp_path: pathlib.Path) -> None:
    """Graphs that rank 0 traced alone reduce over both ranks afterwards, and both ranks end with equal weights."""
    hosts, discover = tmp_path / "hosts", tmp_path / "discover.sh"
    hosts.write_text("localhost:1\n")
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    # Without a network interface horovodrun waits for a second host.
    command = [horovodrun(), "-np", "1", "--min-np", "1", "--max-np", "2", "--gloo", "--network-interfaces", "lo"]
    command += ["--host-discovery-script", str(discover), sys.executable, str(WORKER), str(tmp_path)]
    with processes.job(["env", "-u", "TF_CONFIG", *command], 1, ENVIRONMENT) as job:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline and job.processes[0].poll() is None, job.output(0)
            time.sleep(0.05)
        hosts.write_text("localhost:2\n")
        [end] = job.wait(DEADLINE_SECONDS)
    assert end.code == 0, end.output
    lines = re.findall(r'\[\d\]<stdout>:(\{"rank".*\})', end.output)
    first, second = sorted(map(json.loads, lines), key=lambda one: one["rank"])
    assert (first["resets"], second["resets"]) == ([2], [])
    # The gradients of ranks 0 and 1 are 1 and 3; the sum of the slices' rows is that of their halves.
    assert first["found"] == [2.0, 2.0, 2.0, 0.0, 2.0], "of the graph that was traced with one rank"
    assert second["found"] == [2.0, 2.0, 2.0, 1.0, 2.0]
    assert first["weights"] == second["weights"]
    assert first["rate"] == second["rate"] == pytest.approx(0.2)


def test_only_the_host_of_the_rendezvous_does_without_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Ranks on other hosts, which a job may start later, do not have the user's key."""
    from tfdist.horovod.horovod_engine import _key_without_group

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TFDIST_TOKEN", raising=False)
    own = next(a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", own)
    here = _key_without_group(is_local=False)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "203.0.113.7")
    assert here == _key_without_group(is_local=True)
    with pytest.raises(InputError, match="needs a secret token"):
        _key_without_group(is_local=False)
    monkeypatch.setenv("TFDIST_TOKEN", "the token of this job")
    assert _key_without_group(is_local=False) == _key_without_group(is_local=True) != here
