"""Loggers by name, and a user's own, whose failure does not end a run."""

import json
import logging
import os
import re
import sys

import pytest

from tests import processes
from tfdist import train
from tfdist.config.fields import LOGGERS
from tfdist.config.rules import parse_specs
from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError
from tfdist.reporting import LoggedRun, Logger, Reporter, RunDirectory, RunPlan
from tfdist.reporting.loggers import CATALOG, check_installed, make_loggers

PLAN = RunPlan(total_steps=4, batch_size=2)


class Lines(Logger):
    """Appends what it gets to a file, which it finds again by its id when the run resumes."""

    def __init__(self, run: LoggedRun, fails_at: int = -1):
        self._fails_at = fails_at
        name = run.external_id("lines") or f"lines-{os.getpid()}.txt"
        run.store_external_id("lines", name)
        self._path = run.directory.path / name
        self._write(f"run {run.name} {run.flags['model']} {sorted(run.tags)}")

    def log(self, values, step):
        if step == self._fails_at:
            raise ConnectionError("the server\nis gone")
        self._write(f"{step} {sorted(values)}")

    def close(self, outcome):
        self._write(outcome)

    def _write(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def not_a_reporter():
    return 5


@pytest.fixture
def run(tmp_path) -> LoggedRun:
    directory = RunDirectory(tmp_path / "run")
    directory.make()
    return LoggedRun(directory, {"model": "mlp", "strategy": "single", "token_file": ""})


def lines(run: LoggedRun) -> list[str]:
    return (run.directory.path / run.external_id("lines")).read_text().splitlines()


def test_each_name_has_a_logger():
    assert tuple(CATALOG) == LOGGERS


def test_a_logger_gets_the_numbers_of_records(run):
    for outcome in ("preempted", "done"):  # the second start finds the id of the first
        [logger] = make_loggers(parse_specs(f"{__name__}:Lines"), run)
        logger.start(PLAN)
        logger.progress(1, {"loss": 2.0})
        logger.record({"schema": 1, "kind": "train", "step": 2, "time": 5.0, "loss": 0.5, "note": "text"})
        logger.record({"schema": 1, "kind": "eval", "step": 2, "time": 6.0, "loss": "nan", "accuracy": 0.5})
        logger.close(outcome)
    once = ["run run mlp ['directory', 'model', 'strategy']", "2 ['train/loss']", "2 ['eval/accuracy', 'eval/loss']"]
    assert lines(run) == [*once, "preempted", *once, "done"]
    assert json.loads(run.directory.loggers.read_text()) == {"lines": run.external_id("lines")}


def test_one_that_fails_warns_once(run, caplog):
    [logger] = make_loggers(parse_specs(f"{__name__}:Lines(fails_at=2)"), run)
    for step in (1, 2, 3, 2):
        logger.record({"kind": "train", "step": step, "loss": 0.5})
    logger.close("done")
    assert [line.partition(" ")[0] for line in lines(run)] == ["run", "1"]
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(r"Lines failed and is disabled; training continues. ConnectionError: the server is gone", warning)


def test_one_that_cannot_start_warns_once(run, caplog):
    run = LoggedRun(run.directory, {})
    [logger] = make_loggers(parse_specs(f"{__name__}:Lines"), run)
    logger.start(PLAN)
    assert "KeyError: 'model'" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{__name__}:Lines(at=3)", 'has no parameter "at"'),
        (f"{__name__}:not_a_reporter", "returns a tfdist.reporting.Reporter. Received: int."),
        (f"{__name__}:Nothing", "does not exist: there is no Nothing in it."),
        ("tensorboard(directory='x')", 'has no parameter "directory"'),
    ],
)
def test_what_cannot_be_made(text, message, run):
    with pytest.raises(InputError, match=message):
        make_loggers(parse_specs(text), run)


def test_a_package_that_is_missing_is_named_before_anything_starts(monkeypatch):
    check_installed(parse_specs("tensorboard"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match="--loggers=mlflow needs the package mlflow. .* Run: pip install mlflow-skinny."
    ):
        check_installed(parse_specs("mlflow(experiment='a')"))


def test_any_reporter_may_be_a_logger(run):
    [tensorboard, own] = make_loggers(parse_specs("tensorboard,tfdist.reporting:Reporter"), run)
    tensorboard.record({"kind": "train", "step": 2, "loss": 0.5})
    tensorboard.close("done")
    own.close("done")
    assert [type(reporter) for reporter in own._reporters] == [Reporter]
    assert run.directory.tensorboard.is_dir()


@pytest.mark.processes
@pytest.mark.smoke
def test_only_the_chief_logs_and_a_failure_does_not_end_the_run(tmp_path):
    """Two real processes, whose logger fails at the second record."""
    run = tmp_path / "run"
    flags = ["--model=mlp(hidden=(4,))", "--steps=6", "--log_every=2", f"--loggers={__name__}:Lines(fails_at=4)"]
    command = [sys.executable, "-m", "tfdist.train", *flags, f"--output_dir={run}"]
    with processes.job(command, 2, {"PYTHONPATH": os.getcwd()}) as job:
        ends = job.wait(300)
    assert not [end.output for end in ends if end.code]
    assert ["failed and is disabled" in end.output for end in ends] == [True, False]
    [path] = run.glob("lines-*.txt")
    assert [line.partition(" ")[0] for line in path.read_text().splitlines()] == ["run", "2"]
    assert not (run / "tensorboard").exists()
    assert json.loads((run / "outcome.json").read_text())["outcome"] == "done"


def test_a_logger_of_ones_own_that_does_not_exist_is_refused_before_the_run(tmp_path):
    config = TrainConfig(loggers="no_such_module:Lines", strategy="single", output_dir=str(tmp_path / "run"))
    with pytest.raises(InputError, match='"no_such_module:Lines" needs the module no_such_module,'):
        train.main(config)
    assert not (tmp_path / "run").exists()
