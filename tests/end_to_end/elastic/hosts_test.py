"""Two hosts: network namespaces whose common host name resolves to the loopback, as in containers and on Debian."""

import contextlib
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from tests import jobs as processes

pytestmark = [pytest.mark.full, pytest.mark.separable]

DEADLINE_SECONDS = 300.0
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
CLUSTER = '{"cluster": {"worker": ["10.77.0.1:12345", "10.77.0.2:12345"]}, "task": {"type": "worker", "index": {rank}}}'
TOKEN = {"TFDIST_TOKEN": "the token of this job"}
TRAIN = (sys.executable, "-m", "tfdist.train", "--model=mlp(hidden=(8,))", "--dataset=digits", "--measure_every=0")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def on_host() -> Iterator[list[str]]:
    """The prefix of commands that run on host `{rank}`, 0 or 1, whose address is 10.77.0.1 or 10.77.0.2."""
    own = uuid.uuid4().hex[:6]
    names, links = [f"{own}-{host}" for host in (0, 1)], [f"v{own}{host}" for host in (0, 1)]
    with contextlib.ExitStack() as made:
        for name in names:
            try:
                ip("netns", "add", name)
            except (FileNotFoundError, subprocess.CalledProcessError):
                pytest.skip("only root can make network namespaces")
            made.callback(ip, "netns", "del", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for host, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", link)
            for interface in ("lo", link):
                ip("-n", name, "link", "set", interface, "up")
        yield ["ip", "netns", "exec", f"{own}-{{rank}}"]


@pytest.mark.parametrize(
    ("strategy", "flags"), [("horovod", ()), ("horovod", ("--communication=mpi",)), ("multiworker", ())]
)
def test_processes_of_two_hosts_find_each_other(
    strategy: str, flags: tuple[str, ...], on_host: list[str], tmp_path: pathlib.Path
) -> None:
    train = [*TRAIN, f"--strategy={strategy}", *flags, "--steps=20", f"--output_dir={tmp_path / 'run'}"]
    with processes.job([*on_host, "env", f"TF_CONFIG={CLUSTER}", *train], 2, THREADS | TOKEN) as job:
        ends = job.wait(DEADLINE_SECONDS)
    assert [end.code for end in ends] == [0, 0], ends
    assert "after 20 steps" in ends[0].output


@pytest.mark.parametrize("strategy", ["horovod", "multiworker"])
def test_without_a_token_they_are_refused(strategy: str, on_host: list[str], tmp_path: pathlib.Path) -> None:
    train = [*TRAIN, f"--strategy={strategy}", f"--output_dir={tmp_path / 'run'}"]
    with processes.job([*on_host, "env", f"TF_CONFIG={CLUSTER}", *train], 2, THREADS) as job:
        ends = job.wait(DEADLINE_SECONDS)
    assert [end.code for end in ends] == [2, 2], ends
    assert all("A job on several hosts needs a secret token" in end.output.splitlines()[-1] for end in ends), ends
    assert not (tmp_path / "run").exists()


def test_a_host_that_brings_other_flags_is_refused_and_the_job_goes_on(
    on_host: list[str], tmp_path: pathlib.Path
) -> None:
    hosts, run = tmp_path / "hosts", tmp_path / "run"
    hosts.write_text("10.77.0.1:1\n10.77.0.2:1\n")

    def launch(host: int, *flags: str) -> contextlib.AbstractContextManager[processes.Job]:
        there = [word.replace("{rank}", str(host)) for word in on_host]
        logs = ("--coordinator=10.77.0.1:14000", f"--log_dir={tmp_path / 'logs'}")
        elastic = [sys.executable, "-m", "tfdist.launch", "--processes=1:2", f"--hosts={hosts}", *logs]
        train = [*TRAIN, "--strategy=multiworker", "--steps=100000", "--checkpoint_every=1000", f"--output_dir={run}"]
        return processes.job([*there, *elastic, "--", *train, *flags], 1, THREADS | TOKEN)

    with launch(0) as first:
        first.wait_for(0, "step 10/", DEADLINE_SECONDS)
        with launch(1, "--seed=3") as second:
            [end] = second.wait(DEADLINE_SECONDS)
        assert end.code == 2, end.output
        assert "--seed differs: rank 0 has 0, rank 1 has 3." in end.output
        first.wait_for(0, "Attempt 2: 1 processes.", DEADLINE_SECONDS)
        first.wait_for(0, "resuming  from", DEADLINE_SECONDS)
        assert first.processes[0].poll() is None
        assert "does not match the others, and is refused" in first.output(0)
