"""The directory of a run, and its files on a full disk: /dev/full, which rejects every byte, and a limit, which takes some."""

import contextlib
import json
import logging
import os
import pathlib
from collections.abc import Callable

import numpy as np
import pytest

from tests.limits import files_of_at_most
from tfdist.errors import ExitCode, InputError, WriteError
from tfdist.reporting import RunDirectory, RunPlan, python_logging
from tfdist.reporting.file_errors import reraise_as_write_error
from tfdist.reporting.ledger_file import LedgerFile, NullLedger, UpdatesFile, read_ledger
from tfdist.reporting.reporter import MetricsFile
from tfdist.reporting.tensorboard import TensorBoardReporter

GLOO = "Horovod uses Gloo, because it may."


def create(path) -> RunDirectory:
    directory = RunDirectory.check(path)
    directory.begin("--steps=5\n", hosts=["alpha"], communication=GLOO, clock=lambda: 1770000000.0)
    return directory


def assert_refused(path, *words):
    for action in (RunDirectory.check, create):
        with pytest.raises(InputError) as caught:
            action(path)
        message = str(caught.value)
        assert "\n" not in message
        assert "--output_dir" in message
        for word in (str(path), *words):
            assert word in message


def test_a_run_begins_with_its_flags_and_its_environment(tmp_path):
    directory = create(tmp_path / "runs" / "first")
    assert directory.path == tmp_path / "runs" / "first"
    assert directory.flags.read_text() == "--steps=5\n"
    environment = json.loads(directory.environment.read_text())
    assert environment["hosts"] == ["alpha"]
    assert environment["communication"] == GLOO
    assert environment["started"] == "2026-02-02T02:40:00+00:00"
    names = ["environment.json", "flags.txt", "logs", "starts.jsonl"]
    assert sorted(path.name for path in directory.path.iterdir()) == names


def test_an_empty_model_is_that_of_no_finished_run(tmp_path):
    """As after a failure of the machine."""
    directory = create(tmp_path)
    assert not directory.is_done
    directory.model.touch()
    assert not directory.is_done
    directory.model.write_bytes(b"model")
    assert directory.is_done


def test_a_launcher_may_have_written_its_logs(tmp_path):
    log = RunDirectory(tmp_path).log(0)
    log.parent.mkdir()
    log.write_text("starting\n")
    create(tmp_path)
    assert log.read_text() == "starting\n"


@pytest.mark.parametrize("killed_at", range(3))
def test_a_start_that_was_killed_is_made_again(killed_at, tmp_path, monkeypatch):
    """Killed before the rename of any of the files."""
    replaced = []

    def replace(partial, path, replace=os.replace):
        if len(replaced) == killed_at:
            raise KeyboardInterrupt
        replaced.append(replace(partial, path))

    with monkeypatch.context() as killing, pytest.raises(KeyboardInterrupt):
        killing.setattr(os, "replace", replace)
        create(tmp_path)
    directory = RunDirectory(tmp_path)
    if not directory.is_run:
        directory.check(tmp_path)
    assert directory.is_run == (killed_at > 0)
    assert directory.begin("--steps=5\n", ["alpha"]) == (killed_at > 0)
    assert directory.flags.read_text() == "--steps=5\n"


def test_another_run_is_never_written_over(tmp_path):
    create(tmp_path)
    assert_refused(tmp_path, "empty")


def test_a_check_makes_nothing(tmp_path):
    RunDirectory.check(tmp_path / "runs" / "first")
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_directory(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert_refused(file, "not a directory")
    assert_refused(file / "below", "not a directory")


def test_what_the_system_refuses_is_told_in_its_words(tmp_path):
    assert_refused(tmp_path / ("x" * 300), "File name too long")
    with pytest.raises(InputError, match="Received: /proc/nowhere"):
        create("/proc/nowhere")


def test_a_run_that_has_finished_says_so_until_it_begins_again(tmp_path):
    directory = create(tmp_path)
    assert directory.end_record == {}
    directory.finish({"step": 5})
    assert directory.end_record == {}, "a run without a model has not finished"
    directory.model.write_text("model")
    assert directory.end_record == {"step": 5}
    directory.begin("--steps=9\n", ["alpha"])
    assert directory.end_record == {}


def test_only_the_files_of_a_run_are_deleted(tmp_path):
    directory = create(tmp_path)
    own = ["metrics.jsonl", "metrics-dropped.jsonl", "curves.png", "model.keras", "finished.json"]
    own += ["outcome.json", "loggers.json"]
    own += ["checkpoints/step-000000005/manifest.json", "checkpoints/.step-000000006.partial/index-00000.json"]
    own += ["checkpoints/step-000000004.damaged/manifest.json", "ledger/start-0-rank-1.bin"]
    own += ["tensorboard/train/events.out.tfevents.1.host", "tensorboard/plugins/profile/one"]
    others = ["notes.txt", "checkpoints/mine/a", "checkpoints/step-5", "ledger/note", "tensorboard/events.mine", "lock"]
    others += ["export-000000005/a", "logs/rank-0.log"]
    for name in (*own, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    directory.clear()
    assert not directory.is_run
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted(others)


def test_a_deletion_that_was_interrupted_leaves_a_run(tmp_path, monkeypatch):
    directory = create(tmp_path)
    monkeypatch.setattr(
        type(directory._storage), "remove_directory", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    (tmp_path / "checkpoints" / "step-000000005").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        directory.clear()
    assert directory.is_run and not directory.is_done


RECORD = {"kind": "train", "step": 1, "loss": 0.5}
REMEDY = (
    "Free up disk space, or repair the directory; the same command resumes from the last checkpoint, if there is one."
)


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
    with pytest.raises(WriteError) as raised, reraise_as_write_error("run/a.bin"):
        raise OSError(28, "No space left on device")
    assert str(raised.value) == (
        f"A run must be able to write its files during training. Received: run/a.bin: No space left on device. {REMEDY}"
    )
    assert raised.value.exit_code == ExitCode.FAILED


def test_an_error_of_a_library_in_its_own_words():
    with pytest.raises(WriteError, match="a.bin: Unable to write all of it. Free"), reraise_as_write_error("a.bin"):
        raise OSError("Unable to\nwrite all of it.")


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


@pytest.mark.parametrize(
    ("make", "name"), [(LedgerFile, "a.bin"), (lambda path: python_logging.setup(1, path), "rank-1.log")]
)
def test_a_ledger_or_a_log_that_cannot_be_made(make, name, tmp_path):
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(WriteError, match=f"folder/{name}: File exists"):
        make(tmp_path / "folder" / name)


def test_updates_are_those_that_count_for_the_result(tmp_path):
    directory = create(tmp_path)
    made = [[{"version": version, "start": start} for version in range(first, 6)] for start, first in enumerate((0, 2))]
    assert directory.read_updates() == []
    for start, updates in enumerate(made):
        if start:
            directory.begin("--steps=5\n", ["alpha"], step=2)
        file = UpdatesFile(directory.updates(start), NullLedger())
        file.write_updates(updates[:1]), file.write_updates(updates[1:])
        file.close()
    assert directory.read_updates() == [*made[0][:2], *made[1]]
    path, line = tmp_path / "ledger/start-1-updates.jsonl", json.dumps(made[1][-1])
    for data, count in ((path.read_bytes()[:-1], 5), (path.read_bytes()[: -len(line) // 2], 5), (b"\0\n", 2)):
        path.write_bytes(data)  # a crash
        assert directory.read_updates() == [*made[0][:2], *made[1]][:count]
    directory.clear()
    assert not path.exists()


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


def test_a_log_says_once_that_it_misses_lines(tmp_path, full, capsys):
    full(tmp_path / "rank-1.log")
    with python_logging.setup(1, tmp_path / "rank-1.log"):
        for _ in range(3):
            logging.getLogger("tfdist").info("step")
    assert capsys.readouterr().err == f"{tmp_path}/rank-1.log is incomplete from here on: No space left on device.\n"


def test_a_log_says_nothing_where_the_error_does(tmp_path, full, capsys):
    full(tmp_path / "rank-1.log")
    with pytest.raises(WriteError), python_logging.setup(1, tmp_path / "rank-1.log"), reraise_as_write_error("a"):
        raise OSError(28, "No space left on device")
    assert capsys.readouterr().err == ""
