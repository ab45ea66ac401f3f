"""Terminals are covered by terminal_test.py; Jupyter's kernel is represented by its class, which is all that is read."""

import io
import os
import sys
import types

import pytest

from tfdist.process import terminal
from tfdist.reporting import PlainReporter, RunPlan, terminal_or_plain
from tfdist.reporting.display import is_notebook
from tfdist.reporting.in_place import InPlaceReporter


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
    monkeypatch.setenv(terminal.LAUNCHER_VARIABLE, "70")
    read, write = os.pipe()
    with os.fdopen(read) as _, os.fdopen(write, "w") as pipe, open(tmp_path / "file", "w") as file:
        assert isinstance(terminal_or_plain(pipe), InPlaceReporter)
        assert isinstance(terminal_or_plain(file), PlainReporter)
        assert isinstance(terminal_or_plain(io.StringIO()), PlainReporter)
        monkeypatch.delenv(terminal.LAUNCHER_VARIABLE)
        assert isinstance(terminal_or_plain(pipe), PlainReporter)
