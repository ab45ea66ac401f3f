"""Where progress is drawn in place. progress_bar_test.py covers terminals; the class of its kernel stands for Jupyter."""

import io
import os
import sys
import types

import pytest

from tfdist.cluster import terminal
from tfdist.reporting import RunPlan
from tfdist.reporting.display import InPlaceReporter, is_notebook, terminal_or_plain
from tfdist.reporting.plain_reporter import PlainReporter


class ZMQInteractiveShell:
    """Has the name of the shell of Jupyter's kernel."""


class Shell(ZMQInteractiveShell):
    """Derives from it, as in Colab."""


class TerminalInteractiveShell:
    """Has the name of the shell of IPython in a terminal."""


@pytest.mark.parametrize(
    ("shell", "found"), [(ZMQInteractiveShell, True), (Shell, True), (TerminalInteractiveShell, False)]
)
def test_a_notebook_gets_a_bar_on_stdout(shell, found, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=shell))
    assert is_notebook() is found
    reporter = terminal_or_plain(io.StringIO())
    assert isinstance(reporter, InPlaceReporter) is found
    reporter.start(RunPlan(total_steps=5, batch_size=1))
    assert ("step 0/5" in capsys.readouterr().out) is found


def test_a_program_that_only_imports_ipython_is_no_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert not is_notebook()


def test_a_pipe_to_a_launcher_in_a_terminal_gets_a_bar_and_a_file_gets_lines(monkeypatch, tmp_path):
    monkeypatch.setenv(terminal.COLUMNS_VARIABLE, "70")
    read, write = os.pipe()
    with os.fdopen(read) as _, os.fdopen(write, "w") as pipe, open(tmp_path / "file", "w") as file:
        assert isinstance(terminal_or_plain(pipe), InPlaceReporter)
        assert isinstance(terminal_or_plain(file), PlainReporter)
        assert isinstance(terminal_or_plain(io.StringIO()), PlainReporter)
        monkeypatch.delenv(terminal.COLUMNS_VARIABLE)
        assert isinstance(terminal_or_plain(pipe), PlainReporter)


PLAN = RunPlan(total_steps=500, batch_size=64, examples_per_epoch=1437, description={"model": "mlp"})


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def reporter(stream, clock):
    return InPlaceReporter(stream, 90, 0.2, clock)


def states(stream: io.StringIO) -> list[str]:
    """Returns what was written as lines, each reduced to its last state."""
    return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in stream.getvalue().split("\n")]


def test_lines_remain_above_the_bar_and_states_overwrite_each_other(reporter, stream, clock):
    reporter.start(PLAN)
    with reporter.busy("compiling the training step"):
        assert states(stream)[-1].endswith("compiling the training step ...")
    for step in (10, 20, 30):
        clock.now += 1.0
        reporter.progress(step, {"loss": 1.25, "accuracy": 0.5})
    reporter.record({"kind": "eval", "step": 30, "loss": 0.5})
    assert states(stream)[-1].startswith("epoch 2/23") and states(stream)[-1].endswith("640.00 ex/s")
    reporter.close("done")
    lines = states(stream)
    assert lines[0] == "model  mlp" and lines[1] == "step 30/500  epoch 2/23  eval  loss 0.5000"
    assert lines[2].startswith("epoch 2/23 30/500 ━") and lines[3:] == ["run ended: done", ""]
    assert all(len(state) <= 90 for line in stream.getvalue().split("\n") for state in line.split("\r"))
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("width", "end"),
    [
        (150, "2048 examples/s  staleness 1.50 rank 0 waits 50% for pull"),
        (115, "2048 ex/s staleness 1.50 rank 0 waits 50%"),
        (100, "2048 examples/s"),
        (90, "2048 ex/s"),
    ],
)
def test_staleness_and_who_waits_stay_in_the_bar_if_there_is_room(stream, clock, width, end):
    waiting = {"updates_per_second": 1.0, "compute_seconds": 1.0, "wait_seconds": {"pull": 1.0}}
    reporter = InPlaceReporter(stream, width, 0.0, clock)
    reporter.start(PLAN)
    reporter.record({"step": 10, "loss": 1.0, "accuracy": 0.5, "staleness": 1.5, "workers": [waiting]})
    reporter.progress(400, {"loss": 1.0, "accuracy": 0.5, "examples_per_second": 2048.0})
    assert states(stream)[-1].endswith(end) and "━" in states(stream)[-1]


def test_what_is_logged_meanwhile_is_a_line_of_its_own(reporter, stream):
    reporter.start(PLAN)
    stream.write("a warning\n")
    reporter.close("")
    assert states(stream)[1] == "a warning" and states(stream)[2].startswith("epoch 1/23")
