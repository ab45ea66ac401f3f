import fcntl
import io
import os
import struct
import termios

import pytest

from tfdist.process import terminal
from tfdist.reporting import terminal_or_plain
from tfdist.reporting.progress_bar import TerminalReporter


@pytest.mark.parametrize(("text", "columns"), [("75", 75), ("", 0), ("wide", 0), ("-3", 0)])
def test_the_launcher_tells_the_columns(text, columns):
    assert terminal.launcher_columns({terminal.LAUNCHER_VARIABLE: text}) == columns
    assert terminal.launcher_columns({}) == 0


@pytest.mark.parametrize(("term", "columns"), [("xterm", 79), ("dumb", 0), ("", 0)])
def test_a_terminal_has_its_columns_less_the_one_that_may_wrap(term, columns, monkeypatch):
    monkeypatch.setenv("TERM", term)
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(slave, "w") as stream, os.fdopen(master):
        assert terminal.columns_of(stream) == columns
        assert terminal.has_cursor_control(stream) is terminal.is_watched(stream) is bool(columns)
        assert isinstance(terminal_or_plain(stream), TerminalReporter) is bool(columns)
    assert terminal.columns_of(io.StringIO()) == 0
