"""Detection of hangs and of differences between ranks, with real processes, signals and time limits."""

import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests import jobs as started
from tests import processes

pytestmark = pytest.mark.processes

HERE = pathlib.Path(__file__).parent
START_SECONDS = 300.0
END_SECONDS = 90.0
LONG = ("--dataset=digits", "--model=mlp", "--steps=100000", "--epochs=0", "--output_dir=run")

OF_RANKS = r' differs: rank 0 has "{}", rank 1 has "{}"\. It must be the same on every process\.'
DIFFERENT_VARIABLES = {
    "horovod": (
        "variable sequential/dense/kernel" + OF_RANKS.format(r"float32\[5, 4\]", r"float32\[5, 5\]"),
        "variable sequential/dense/kernel #2" + OF_RANKS.format(r"float32\[4, 1\]", r"float32\[4, 4\]"),
    ),
    "multiworker": (
        r"variable number \d+" + OF_RANKS.format(r"kernel float32\[5, 4\]", r"kernel float32\[5, 5\]"),
        r"variable number \d+" + OF_RANKS.format(r"kernel float32\[4, 1\]", r"kernel float32\[4, 4\]"),
    ),
}


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")


def train(*flags: str) -> list[str]:
    return [sys.executable, "-m", "tfdist.train", *flags]


def wait_for_handler(pid: int, signum: signal.Signals) -> None:
    deadline = time.monotonic() + START_SECONDS
    status = pathlib.Path(f"/proc/{pid}/status")
    while not int(re.search(r"^SigCgt:\s*(\w+)", status.read_text(), re.M)[1], 16) >> (signum - 1) & 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_that_sleeps() -> None:
    """All ranks end with code 4, and so does the launcher, which names the cause."""
    flags = ("--processes=3", "--launcher=horovod", "--log_dir=logs")
    command = [sys.executable, str(HERE / "stalls_worker.py")]
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", *flags, "--", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_SECONDS + END_SECONDS,
    )
    logs = [pathlib.Path("logs", f"rank-{rank}.log").read_text() for rank in range(3)]
    assert done.returncode == 4, done.stderr
    assert "in a call: 0, 1; not in a call: 2.\n" in logs[0]
    report = logs[0].partition("in a call: 0, 1; not in a call: 2.\n")[2]
    assert re.search(r"^rank 0: step 20, for \d+\.\d s in the wait for the callbacks of step 20$", report, re.M)
    of_rank_2 = report.partition("rank 2: step 20, between two calls\n")[2]
    program = (HERE / "stalls_worker.py").read_text().splitlines()
    [line] = [number for number, text in enumerate(program, 1) if text.endswith("# here")]
    assert f"stalls_worker.py:{line} on_train_batch_end\n" in of_rank_2
    why = "the wait for the callbacks of step 20 has lasted 4 s, as long as --stall_shutdown_seconds allows"
    # A rank that the launcher ends after another one may not have time to print it.
    assert any(f"rank {rank} of 3: {why}. Ending with code 4.\n" in log for rank, log in enumerate(logs))
    # A rank that is notified of another's end before its own reports that, too; only the launcher's line is checked.
    said = [
        text for text in done.stderr.splitlines() if text.startswith("tfdist launch: ") and "ended with code" in text
    ]
    assert len(said) == 1 and f"ended with code 4 (stalled): {why}" in said[0]


@pytest.mark.parametrize(
    ("strategy", "found"),
    [
        (("--strategy=horovod",), "in a call: 0; no answer: 1."),
        (("--strategy=pipeline", "--communication=gloo"), "in a call: 0 (stage 0); no answer: 1 (stage 1)."),
    ],
    ids=["horovod", "pipeline"],
)
def test_a_rank_that_is_stopped(strategy: tuple[str, ...], found: str) -> None:
    """With Horovod, because multiworker's engine detects it by itself after about ten seconds, and ends with code 5."""
    limits = (
        "--stall_warning_seconds=2",
        "--stall_shutdown_seconds=4",
        "--eval_every=1000000",
    )  # an evaluation is not limited
    with processes.job(train(*LONG, *limits, *strategy), 2) as job:
        job.wait_for(0, "step 20/", START_SECONDS)
        job.processes[1].send_signal(signal.SIGSTOP)
        job.wait_for(0, "Ending with code 4.", END_SECONDS)
        assert found in job.output(0)
        job.processes[1].send_signal(signal.SIGCONT)
        ended = job.wait(END_SECONDS)
    assert ended[0].code == 4
    assert ended[1].code in (4, 5), ended[1].output  # it is notified of the end while its engine fails


def test_a_signal_asks_at_any_time_and_the_run_goes_on() -> None:
    flags = ("--dataset=digits", "--model=mlp", "--epochs=80", "--output_dir=run", "--strategy=multiworker")
    with started.job(train(*flags), 2) as job:
        wait_for_handler(job.processes[1].pid, signal.SIGUSR1)  # before it imports TensorFlow, and starts its engine
        job.processes[1].send_signal(signal.SIGUSR1)
        job.wait_for(1, "Stack of this process (SIGUSR1):\n", START_SECONDS)
        job.wait_for(0, "step 20/", START_SECONDS)
        job.processes[1].send_signal(signal.SIGUSR1)
        job.wait_for(0, "State of the ranks (SIGUSR1 to rank 1).", END_SECONDS)
        ended = job.wait(START_SECONDS)
    assert [end.code for end in ended] == [0, 0]
    report = ended[0].output.partition("State of the ranks (SIGUSR1 to rank 1).")[2]
    assert "\nrank 0: step " in report and "\nrank 1: step " in report
    assert "State of the ranks" not in ended[1].output


@pytest.mark.parametrize("strategy", [pytest.param("horovod", marks=pytest.mark.smoke("gloo")), "multiworker"])
def test_versions_code_models_and_bits_that_differ(strategy: str) -> None:
    """With multiworker, variables are compared when they are created, because the engine itself compares them there."""
    for output in processes.finish([sys.executable, str(HERE / "differing_ranks_worker.py"), strategy], 2):
        said = dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)
        assert said["nothing"] == "trained"
        assert said["version"].startswith("InputError: version of keras differs: rank 0 has ")
        assert '"9.9"' in said["version"]
        code = "InputError: the code of own_of_test.py (module own_of_test) differs: rank 0 has "
        assert said["code"].startswith(code)
        shape, more = DIFFERENT_VARIABLES[strategy]
        assert re.fullmatch(f"InputError: {shape}", said["shape"]), said["shape"]
        assert re.fullmatch(f"InputError: {more}", said["more"]), said["more"]
        setting = 'InputError: layer dense: activation differs: rank 0 has "relu", rank 1 has "tanh".'
        momentum = 'InputError: optimizer sgd: momentum differs: rank 0 has "0.9", rank 1 has "0.5".'
        assert said["setting"].startswith(setting) and said["momentum"].startswith(momentum)
        assert said["bit"].startswith("DesyncError: All replicas must hold the same values. Received before step 20: ")
        assert "model/sequential" in said["bit"]
        assert "differs: replica 1 of rank 1 from replica 0 of rank 0" in said["bit"]
