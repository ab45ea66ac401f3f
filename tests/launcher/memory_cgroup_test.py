import os
import pathlib
import subprocess
import sys
import uuid

import pytest

from tests.waiting import DEADLINE
from tfdist.launcher import child
from tfdist.launcher.child import out_of_memory_kills

V1 = pathlib.Path("/sys/fs/cgroup/memory")


@pytest.mark.parametrize(
    "membership, files, kills",
    [
        ("0::/job/a\n", {"job/a/memory.events": "low 0\noom 4\noom_kill 3\noom_group_kill 9\n"}, 3),  # version 2
        (  # version 1: in the group of the memory controller
            "9:name=systemd:/x\n4:cpu,memory:/job/a\n0::/\n",
            {
                "memory/job/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
                "memory.events": "oom_kill 8\n",
            },
            2,
        ),
        ("0::/docker/1234\n", {"memory.events": "oom_kill 5\n"}, 5),  # the container does not see the path: its root
        ("4:memory:/\n", {"memory/memory.oom_control": "oom_kill_disable 0\n"}, 0),  # none before Linux 4.13
    ],
)
def test_kills_are_counted_in_files_of_the_system(membership, files, kills, tmp_path, monkeypatch):
    monkeypatch.setattr(child, "_CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(child, "_MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text(membership)
    for path, text in files.items():
        file = tmp_path / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert out_of_memory_kills() == kills


@pytest.fixture
def limited_group():
    """Creates a control group with 200 MiB of memory."""
    group = V1 / f"tfdist-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 * 2**20))
    except OSError:
        pytest.skip("Needs version 1 of control groups, and root.")
    yield group
    group.rmdir()


@pytest.mark.processes
@pytest.mark.parametrize("program, code", [("bytearray(400 * 2**20)", 6), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_a_rank_that_the_kernel_kills_for_lack_of_memory_is_code_6(program, code, limited_group, tmp_path):
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", f"--log_dir={tmp_path}", "--"]
    rank = f"import os, time\nif '\"index\": 1' in os.environ['TF_CONFIG']:\n    {program}\nelse:\n    time.sleep(600)"
    done = subprocess.run(
        [*launch, sys.executable, "-c", rank],
        preexec_fn=lambda: (limited_group / "cgroup.procs").write_text(str(os.getpid())),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == code, done.stderr
    assert ("the kernel killed rank 1" in done.stderr) == (code == 6), done.stderr
    assert f"rank 1 ended with code {code}" in done.stderr
