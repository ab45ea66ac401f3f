import fcntl
import io
import os
import struct
import termios

import pytest

from tfdist.process import launcher_terminal


@pytest.mark.parametrize(("text", "columns"), [("75", 75), ("", 0), ("wide", 0), ("-3", 0)])
def test_the_launcher_tells_the_columns(text, columns):
    assert launcher_terminal.columns({launcher_terminal.VARIABLE: text}) == columns
    assert launcher_terminal.columns({}) == 0


@pytest.mark.parametrize(("term", "columns"), [("xterm", 79), ("dumb", 0), ("", 0)])
def test_a_terminal_has_its_columns_less_the_one_that_may_wrap(term, columns, monkeypatch):
    monkeypatch.setenv("TERM", term)
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(slave, "w") as terminal, os.fdopen(master):
        assert launcher_terminal.columns_of(terminal) == columns
    assert launcher_terminal.columns_of(io.StringIO()) == 0
