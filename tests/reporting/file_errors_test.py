"""Files of a run on a full disk: /dev/full, which rejects every byte, and a resource limit, which accepts some."""

import contextlib
import io
import logging
import os
import pathlib
import resource
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tfdist.errors import ExitCode, WriteError
from tfdist.reporting import (
    CurvesReporter,
    LedgerFile,
    MetricsFile,
    RunDirectory,
    RunPlan,
    TensorBoardReporter,
    chief_reporter,
    python_logging,
)
from tfdist.reporting.file_errors import must_write
from tfdist.reporting.ledger_file import read_ledger

RECORD = {"kind": "train", "step": 1, "loss": 0.5}
REMEDY = "Free space, or repair the directory; the same command resumes from the last checkpoint, if there is one."


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def full(monkeypatch) -> Callable[[pathlib.Path], None]:
    """Returns a function that leaves no room for a file: what is opened in its place is /dev/full."""
    paths: set[str] = set()
    true = os.open

    def opened(path, flags, *arguments, **named):
        if str(path) not in paths:
            return true(path, flags, *arguments, **named)
        return true("/dev/full", os.O_WRONLY)

    monkeypatch.setattr("tfdist.storage.file_system.os.open", opened)
    monkeypatch.setattr("tfdist.storage.file_system.stat.S_ISREG", lambda mode: True)
    monkeypatch.setattr("tfdist.storage.file_system.os.replace", lambda source, target: None)
    return lambda path: paths.add(str(path))


def test_the_line_has_the_file_the_cause_and_the_remedy():
    with pytest.raises(WriteError) as raised, must_write("run/a.bin"):
        raise OSError(28, "No space left on device")
    assert str(raised.value) == (
        f"A run must be able to write its files during training. Received: run/a.bin: No space left on device. {REMEDY}"
    )
    assert raised.value.exit_code == ExitCode.FAILED


def test_an_error_of_a_library_in_its_own_words():
    with pytest.raises(WriteError, match="a.bin: Unable to write all of it. Free"), must_write("a.bin"):
        raise OSError("Unable to\nwrite all of it.")


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), must_write("a"):
        _ = 1 / 0


def test_a_ledger_keeps_the_calls_that_it_had_room_for(tmp_path):
    path = tmp_path / "ledger" / "a.bin"
    file = LedgerFile(path)
    with files_of_at_most(200):
        file.write(0, 2, np.arange(16))
        with pytest.raises(WriteError, match="a.bin: File too large. Free"):
            file.write(2, 2, np.arange(16))
        file.close()  # a failed write is not retried, which would hide the first error
    assert path.stat().st_size == 200
    assert [step for step, _ in read_ledger(path)] == [0, 1]


def test_a_ledger_that_cannot_be_made(tmp_path):
    (tmp_path / "ledger").write_text("in the way")
    with pytest.raises(WriteError, match="ledger/a.bin: File exists"):
        LedgerFile(tmp_path / "ledger" / "a.bin")


def test_a_ledger_that_cannot_be_made_durable(tmp_path, monkeypatch):
    file = LedgerFile(tmp_path / "a.bin")

    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(WriteError, match="a.bin: Input/output error"):
        file.sync()
    file.close()


def test_metrics(tmp_path, full):
    full(tmp_path / "metrics.jsonl")
    reporter = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(WriteError, match="metrics.jsonl: No space left on device"):
        reporter.record(RECORD)
    reporter.close("failed")


def test_tensorboard(tmp_path):
    reporter = TensorBoardReporter(tmp_path)
    reporter.start(RunPlan(total_steps=10, batch_size=4))
    reporter.record(RECORD)
    with files_of_at_most(1 << 12), pytest.raises(WriteError, match=f"{tmp_path}: File too large. Free"):
        for step in range(2, 1000):
            reporter.record({**RECORD, "step": step})
    with contextlib.suppress(WriteError):
        reporter.close("failed")


def test_curves(tmp_path, full):
    full(tmp_path / "curves.png.partial")
    reporter = CurvesReporter(tmp_path / "curves.png")
    reporter.record(RECORD)
    with pytest.raises(WriteError, match="curves.png: No space left on device"):
        reporter.close("done")


def test_all_are_closed_when_one_is_full(tmp_path, full):
    directory = RunDirectory.create(tmp_path / "run", flags="", hosts=["alpha"])
    full(directory.path / "curves.png.partial")
    stream = io.StringIO()
    reporter = chief_reporter(directory, stream)
    reporter.record(RECORD)
    with pytest.raises(WriteError):
        reporter.close("not finite")
    assert "run ended: not finite" in stream.getvalue()


def test_a_log_says_once_that_it_misses_lines(tmp_path, full, capsys):
    full(tmp_path / "rank-1.log")
    with python_logging.setup(1, tmp_path / "rank-1.log"):
        for _ in range(3):
            logging.getLogger("tfdist").info("step")
    assert capsys.readouterr().err == f"{tmp_path}/rank-1.log lacks lines from here on: No space left on device.\n"


def test_a_log_says_nothing_where_the_error_does(tmp_path, full, capsys):
    full(tmp_path / "rank-1.log")
    with pytest.raises(WriteError), python_logging.setup(1, tmp_path / "rank-1.log"), must_write("a"):
        raise OSError(28, "No space left on device")
    assert capsys.readouterr().err == ""


def test_a_log_that_cannot_be_made(tmp_path):
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(WriteError, match="rank-1.log: File exists"):
        python_logging.setup(1, tmp_path / "logs" / "rank-1.log")
