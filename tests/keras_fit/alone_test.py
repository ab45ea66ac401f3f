"""Scripts on several processes: actions of one process alone, files of all, and rows that are gathered, also uneven ones."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import processes
from tests.programs import running
from tests.programs.catalog import Program

pytestmark = pytest.mark.processes
PROGRAM = str(pathlib.Path(__file__).with_name("alone_program.py"))
LINES = re.compile(r"^(?:checkpoints|loaded|chief's|restored|epochs).*$", re.MULTILINE)


def plain(directory: pathlib.Path) -> list[str]:
    directory.mkdir()
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    code = f"import keras; keras.utils.set_random_seed(0); import sys, runpy; sys.argv = [{PROGRAM!r}, '0']; "
    command = [sys.executable, "-c", code + f"runpy.run_path({PROGRAM!r}, run_name='__main__')"]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return LINES.findall(done.stdout)


def numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", line)]


@pytest.mark.parametrize("strategy", ["multiworker", pytest.param("horovod", marks=pytest.mark.full)])
def test_it_waits_for_nobody_and_gives_one_device_s_numbers(
    strategy: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = numbers(plain(tmp_path / "plain"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "misuse").touch()
    run = [sys.executable, "-m", "tfdist.run", f"--strategy={strategy}", "--stall_shutdown_seconds=60"]
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with processes.job([*run, PROGRAM, "{rank}"], 2, threads) as job:
        ends = job.wait(300)
    for end in ends:
        assert numbers(LINES.findall(end.output)) == pytest.approx(expected, rel=1e-3), end.output
        assert end.code == 2, end.output
        for part in (
            "Every rank must make the same calls",
            "rank 0 in 'call",
            "rank 1 in 'end'",
            "alone_program.py, line",
        ):
            assert part in end.output, end.output


GATHERED = Program(str(pathlib.Path(__file__).with_name("gathered_program.py")))


def test_it_gives_one_device_s_numbers_and_shares_the_work() -> None:
    plain = running.start(GATHERED.path, "plain")
    ours = running.start(GATHERED.path, "multiworker")
    assert running.verdict(GATHERED, ours, plain) == "equal", ours.output
    assert "needs all rows" not in ours.output
