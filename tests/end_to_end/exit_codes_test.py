"""The end of real processes: the exit code, one line with the reason, and no process that is left running."""

import json
import pathlib
import re
import signal
import sys

import pytest

from tests import processes
from tests.selection import quick

pytestmark = pytest.mark.processes

START_SECONDS = 300.0
END_SECONDS = 60.0
LONG = ("--dataset=digits", "--model=mlp", "--steps=100000", "--epochs=0")
OWN_MODULE = """
import keras, numpy as np

def infinite():
    x = np.zeros((64, 3), "float32")
    x[40] = np.inf
    return x, np.ones((64, 1), "float32")

def line():
    return keras.Sequential([keras.layers.Dense(1)])

def absurd(classes):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10**5), keras.layers.Dense(10**8)])
"""


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Runs commands in an empty directory, without settings of the test process."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_of_test.py").write_text(OWN_MODULE)


def train(*flags: str) -> list[str]:
    return [sys.executable, "-m", "tfdist.train", *flags]


def line_with(output: str, text: str) -> str:
    """Returns the only line with a text; asserts that there is no traceback."""
    assert "Traceback" not in output, output
    lines = [line for line in output.splitlines() if text in line]
    assert len(lines) == 1, output
    return lines[0]


@pytest.mark.parametrize("size", quick([1, 2], 2))
def test_a_loss_that_is_not_finite(size: int, tmp_path: pathlib.Path) -> None:
    flags = ("--dataset=own_of_test:infinite", "--model=own_of_test:line", "--loss=mean_squared_error", "--metrics=")
    length = ("--batch_size=8", "--steps=100", "--log_every=1", "--output_dir=run")
    outputs = processes.finish(train(*flags, *length), size, code=3)
    steps = set()
    for rank, output in enumerate(outputs):
        said = line_with(output, "The loss is")  # once, not also from the reporter
        found = re.match(r"tfdist train: The loss is (nan|inf) at step (\d+)\.", said)
        assert found, output
        steps.add(int(found[2]))
        log = (tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert said.removeprefix("tfdist train: ") in log
    [step] = steps
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, step + 1))
    assert "--batch_size=8\n" in (tmp_path / "run" / "flags.txt").read_text()
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert line_with(outputs[0], "run ended: ") == "run ended: loss not finite"


def test_a_profile_of_some_steps(tmp_path: pathlib.Path) -> None:
    """Calls of the compiled loop end with the profiled steps, on all ranks, although only the chief takes the profile."""
    flags = ("--dataset=digits", "--model=mlp", "--steps=6", "--log_every=6", "--profile_steps=2:4", "--output_dir=run")
    processes.finish(train(*flags), 2)
    assert list((tmp_path / "run").rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("strategy", "size", "dies"),
    [
        pytest.param("multiworker", 2, 1, marks=pytest.mark.full),
        pytest.param("horovod", 3, 2, marks=pytest.mark.full),
        ("horovod", 3, 0),
        pytest.param("multiworker", 2, 0, marks=pytest.mark.smoke("train")),
    ],
)
def test_a_peer_that_is_killed(strategy: str, size: int, dies: int) -> None:
    with processes.job(train(*LONG, f"--strategy={strategy}", "--output_dir=run"), size) as job:
        job.wait_for(0, "step 20/", START_SECONDS)
        job.processes[dies].kill()
        ended = job.wait(END_SECONDS)
    for rank, end in enumerate(ended):
        if rank == dies:
            assert end.code == -signal.SIGKILL
            continue
        assert end.code == 5, end.output
        line = line_with(end.output, "Ending with code 5")
        assert line.startswith(f"rank {rank} of {size}: rank {dies} "), line


@pytest.mark.parametrize("dies", [pytest.param(1, marks=pytest.mark.full), 0])
def test_a_peer_that_is_killed_while_the_engines_start(dies: int) -> None:
    """The others wait for its server in a call that blocks all of their Python threads."""
    start = (
        "import os, runpy, signal, sys, tensorflow as tf\n"
        "def die(*_): print('dies', flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        "if sys.argv[1] == sys.argv[2]: tf.distribute.MultiWorkerMirroredStrategy = die\n"
        "del sys.argv[1:3]\n"
        "runpy.run_module('tfdist.train', run_name='__main__')\n"
    )
    flags = (*LONG, "--strategy=multiworker", "--start_timeout_seconds=12", "--output_dir=run")
    with processes.job([sys.executable, "-c", start, "{rank}", str(dies), *flags], 2) as job:
        job.wait_for(dies, "dies", START_SECONDS)
        ended = job.wait(12 + END_SECONDS)
    assert ended[dies].code == -signal.SIGKILL
    survivor = ended[1 - dies]
    assert survivor.code == 5, survivor.output
    line = line_with(survivor.output, "Ending with code 5")
    assert line.startswith(f"rank {1 - dies} of 2: rank {dies} is lost"), line


def test_a_peer_that_never_comes() -> None:
    come = "import os, sys; sys.exit() if sys.argv[1] == '1' else os.execv(sys.argv[2], sys.argv[2:])"
    flags = (*LONG, "--strategy=multiworker", "--start_timeout_seconds=4", "--output_dir=run")
    with processes.job([sys.executable, "-c", come, "{rank}", *train(*flags)], 2) as job:
        ended = job.wait(START_SECONDS)
    assert [end.code for end in ended] == [5, 0], ended[0].output
    line = line_with(ended[0].output, "tfdist train: ")
    assert "rank 1" in line and "4 s" in line, line


def test_flags_that_differ() -> None:
    flags = ("--strategy=multiworker", "--output_dir=run", "--seed={rank}")
    for output in processes.finish(train(*LONG, *flags), 2, code=2):
        assert "--seed" in line_with(output, "tfdist train: ")


def test_out_of_memory() -> None:
    flags = ("--dataset=digits", "--model=own_of_test:absurd", "--steps=2", "--output_dir=run")
    [output] = processes.finish(train(*flags), code=6)
    line = line_with(output, "tfdist train: ")
    assert "36.4 TiB" in line and "--batch_size" in line, line


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_file_that_cannot_be_written(strict: bool, tmp_path: pathlib.Path) -> None:
    """Rank 1's files are limited to 8 KiB, which its ledger reaches at step 16; unlike for checkpoints, this is an error."""
    start = (
        "import resource, runpy, sys\n"
        "rank = sys.argv.pop(1)\n"
        "if rank == '1': resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, 1 << 13))\n"
        "runpy.run_module('tfdist.train', run_name='__main__', alter_sys=True)\n"
    )
    flags = (*LONG, "--strategy=multiworker", "--output_dir=run", "--batch_size=128", "--checkpoint_every=100000")
    command = [sys.executable, "-c", start, "{rank}", *flags, f"--checkpoint_strict={strict}"]
    with processes.job(command, 2) as job:
        ended = job.wait(START_SECONDS)
    assert [end.code for end in ended] == [5, 1], "\n".join(end.output for end in ended)
    said = (
        "A run must be able to write its files during training. Received: run/ledger/start-0-rank-1.bin: File too large. Free "
        "space, or repair the directory; the same command resumes from the last checkpoint, if there is one."
    )
    assert line_with(ended[1].output, "ledger") == f"tfdist train: {said}"
    assert line_with(ended[0].output, "ledger") == (
        f"rank 0 of 2: rank 1 is lost: ended with code 1 (failed): {said} Ending with code 5."
    )
