"""The launcher as started by users, with real processes and signals."""

import json
import resource
import signal
import subprocess
import sys
import time

import pytest

from tests.launcher import conftest
from tests.launcher.launching import member, python
from tests.waiting import DEADLINE
from tfdist.cluster.signals import TOGETHER_SECONDS
from tfdist.launcher.supervision import FAILURE_SECONDS

pytestmark = [pytest.mark.processes, pytest.mark.waits]
launch = conftest.launch


@pytest.mark.smoke("launch")
def test_every_rank_gets_its_place_and_its_lines_and_its_log(launch, tmp_path):
    body = "print(rank, os.environ['TF_CONFIG']); print('no', file=sys.stderr)"
    one = launch(*python(body), flags=("--processes=3",))
    assert one.wait() == 0
    lines = sorted(one.out.splitlines())
    assert [line[:5] for line in lines] == ["[0] 0", "[1] 1", "[2] 2"]
    configs = [json.loads(line.split(maxsplit=2)[2]) for line in lines]
    assert [config["task"]["index"] for config in configs] == [0, 1, 2]
    assert len(set(configs[0]["cluster"]["worker"])) == 3
    assert sorted(line for line in one.err.splitlines() if line not in one.said) == ["[0] no", "[1] no", "[2] no"]
    (directory,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in directory.iterdir()) == ["rank-0.log", "rank-1.log", "rank-2.log"]
    assert "no\n" in (directory / "rank-1.log").read_text()
    assert one.said[0] == f"tfdist launch: ranks 0, 1, 2 of 3, logs in {directory.relative_to(tmp_path)}"
    assert len(one.said) == 2 and "accept anyone who can reach their ports" in one.said[1]


def computed_by_children():
    """Returns the CPU time in seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_it_starts_quickly_and_imports_no_tensorflow(launch):
    before = computed_by_children()
    assert launch("true").wait() == 0
    assert computed_by_children() - before < 3.0  # 0.3 s; the time that passes depends on what else runs
    # Also where the environment is not activated, `python` is the launcher's.
    assert launch("python", "-c", "import tfdist", PATH="/usr/bin:/bin").wait() == 0
    code = "import sys, tfdist.launch; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE).returncode == 0


def test_the_ranks_group_is_served_and_what_says_otherwise_is_cleared(launch):
    one = launch(
        *member("print(sorted(n for n in os.environ if n in ('RANK', 'HOROVOD_RANK', 'TFDIST_COORDINATOR')))"),
        RANK="7",
        HOROVOD_RANK="7",
        TFDIST_COORDINATOR="elsewhere:1",
        TFDIST_TOKEN="",
    )
    assert one.wait() == 0
    assert sorted(one.out.splitlines()) == ["[0] []", "[1] []"]


@pytest.mark.parametrize("code", [1, 3, 42])
def test_one_that_fails_ends_all_and_gives_its_code(launch, code):
    one = launch(
        *python(f"time.sleep(0.2)\nif rank == 1: sys.exit({code})\ntime.sleep(1000)"), flags=("--processes=3",)
    )
    assert one.wait() == code
    assert one.said[-1].startswith(f"tfdist launch: rank 1 ended with code {code}")
    assert one.said[-1].endswith("rank-1.log")


def test_one_that_ignores_the_wish_is_killed(launch):
    body = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\nopen('up', 'w').close()"
    dies = "while not os.path.exists('up'): time.sleep(0.01)\n    os.kill(os.getpid(), 9)"
    one = launch(*python(f"if rank == 0:\n    {dies}\n{body}\ntime.sleep(1000)"))
    assert one.read_line() == "[1] deaf\n"
    assert one.wait() == 137
    assert one.seconds > FAILURE_SECONDS
    assert "rank 0 ended with code 137 (killed by SIGKILL)" in one.said[-1]


def test_the_cause_is_not_the_first_exit(launch):
    """Rank 0 is notified of rank 1's end, and ends before rank 1's interpreter does."""
    body = (
        "import tfdist.errors\n    if cluster.rank == 1:\n"
        "        import atexit; atexit.register(time.sleep, 2.0)\n"
        "        group.leave(3, 'step 7: the loss is inf'); sys.exit(3)\n"
        "    group.first_loss(wait=60); os._exit(5)"
    )
    one = launch(*member(body))
    assert one.wait() == 3
    assert "rank 1 ended with code 3 (loss not finite): step 7: the loss is inf" in one.said[-1]


STUCK = """
import atexit, os, sys, threading, time
from tfdist.cluster.environment import from_tf_config
from tfdist.coordination import join
cluster = from_tf_config(os.environ)
group = join(cluster)
if cluster.rank == 1:
    {how}
    {end}
time.sleep(1000)  # as in a collective
"""
THREAD = "threading.Thread(target=time.sleep, args=(1000,)).start()"
HANDLER = "atexit.register(time.sleep, 1000); atexit.register(lambda: time.sleep(0.5) or print('at exit', flush=True))"


@pytest.mark.parametrize(
    "how, end, code, reason",
    [
        (THREAD, "raise ValueError('wrong')", 1, "code 1 (failed): ValueError: wrong. "),
        (
            HANDLER,
            "import tfdist.errors; raise tfdist.errors.PeerLostError('late')",
            5,
            "code 5 (a peer was lost): late. ",
        ),
    ],
)
def test_a_rank_that_fails_but_does_not_end_ends_all(launch, how, end, code, reason):
    """Its exit handlers have time to run."""
    one = launch(sys.executable, "-c", STUCK.format(how=how, end=end), TF_CPP_MIN_LOG_LEVEL="2")
    assert one.wait() == code
    assert f"rank 1 ended with {reason}" in one.said[-1]
    assert (how == HANDLER) == ("[1] at exit" in one.out.splitlines())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_waited_for(launch, number):
    body = (
        "import signal\ndef save(*_): print('saved', flush=True); sys.exit({code})\nsignal.signal(signal.SIGTERM, save)"
    )
    body += "\nprint('ready', flush=True)\ntime.sleep(1000)"
    for code, expected in ((75, 75), ("rank", 128 + number)):
        one = launch(*python(body.format(code=code)))
        assert {one.read_line(), one.read_line()} == {"[0] ready\n", "[1] ready\n"}
        one.process.send_signal(number)
        assert one.wait() == expected
        assert sorted(one.out.splitlines()) == ["[0] saved", "[1] saved"]
    assert one.said[-1] == f"tfdist launch: ended by {signal.Signals(number).name}."


def test_a_second_signal_kills(launch):
    body = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))"
    body += "\nprint('deaf', flush=True)\ntime.sleep(1000)"
    one = launch(*python(body))
    assert {one.read_line(), one.read_line()} == {"[0] deaf\n", "[1] deaf\n"}
    one.process.send_signal(signal.SIGINT)
    assert {one.read_line(), one.read_line()} == {"[0] asked\n", "[1] asked\n"}
    time.sleep(TOGETHER_SECONDS + 0.2)
    began = time.monotonic()
    one.process.send_signal(signal.SIGINT)
    assert one.wait() == 130
    assert time.monotonic() - began < 40.0  # not the grace of 60 s


def test_output_that_nobody_reads_ends_the_job(launch):
    flags = ("--max_restarts=9", "--restart_backoff_seconds=60")  # which must not apply
    one = launch(*python("while True: print('x' * 100)"), flags=flags)
    assert one.process.stdout
    one.read_line()
    one.process.stdout.close()
    assert one.process.wait(timeout=DEADLINE) == 141
