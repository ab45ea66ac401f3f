"""Programs as written by users of Horovod, with only the import line changed, on two real ranks and on one."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import processes
from tests.horovod.jobs import ENVIRONMENT, launched

pytest.importorskip("horovod")

pytestmark = pytest.mark.processes

HERE = pathlib.Path(__file__).parent
WORKER = HERE / "programs_worker.py"
PROGRAMS = sorted((HERE.parent / "programs" / "horovod").glob("*.py"))
SAVED = {
    "keras_mnist_advanced": "checkpoint-4.keras",
    "keras_elastic": "checkpoint-4.h5",
    "tape_elastic": "checkpoints/tape-1.index",
    "grouped_and_sparse": "checkpoints/vectors-1.index",
}
IMPORT = "import tfdist.horovod as hvd\n"


def falling(losses: list[float]) -> bool:
    return len(losses) >= 4 and sum(losses[-2:]) < 0.9 * sum(losses[:2])


def printed_losses(output: str) -> list[float]:
    """Returns the losses that rank 0 has printed."""
    return [float(x) for x in re.findall(r"(?:Loss:|pairs:) (\d+\.\d+)", output)]


def test_every_program_trains_on_two_ranks_that_end_equal(tmp_path):
    """One job runs all programs, one after another; each one's files are saved once."""
    worker = [str(WORKER), str(tmp_path / "runs"), *map(str, PROGRAMS)]
    [output] = processes.finish(launched(worker, f"--log_dir={tmp_path}/log"), environment=ENVIRONMENT)
    logs = [(tmp_path / "log" / f"rank-{rank}.log").read_text() for rank in range(2)]
    found = [[json.loads(line) for line in log.splitlines() if line.startswith('{"program"')] for log in logs]
    assert [one["program"] for one in found[0]] == [path.stem for path in PROGRAMS]
    for one, other in zip(*found, strict=True):
        assert one["weights"] == other["weights"], f"{one['program']}: the ranks' weights differ"
    parts = re.split(r'^\{"program".*$', logs[0], flags=re.MULTILINE)
    for one, output in zip(found[0], parts, strict=False):
        if one["program"] != "synthetic_benchmark":  # which learns random labels
            assert falling(one["losses"] or printed_losses(output)), (one["program"], one["losses"], output)
    for name, path in SAVED.items():
        assert (tmp_path / "runs" / name / path).exists(), name
    assert "finished gradual learning rate warmup to 8." in logs[0]
    assert "Total img/sec on 2 CPU(s)" in logs[0]
    assert logs[0].count("optimizer.variables() is optimizer.variables in Keras 3") == 1


def test_nothing_but_the_import_is_adapted():
    for path in PROGRAMS:
        text = path.read_text()
        assert text.count(IMPORT) == text.count("tfdist") == 1, path
    assert len(PROGRAMS) == len(SAVED) + 1


@pytest.mark.full
@pytest.mark.separable
@pytest.mark.parametrize("is_launched", [True, False], ids=["launched", "alone"])
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_by_itself(path, is_launched, tmp_path):
    command = launched([str(path)]) if is_launched else [sys.executable, str(path)]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert path.stem not in SAVED or (tmp_path / SAVED[path.stem]).exists()
