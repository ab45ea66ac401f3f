"""A text while something loads; a launcher's line is covered by output_forwarding_test.py."""

import io
import os
import sys

import pytest

from tfdist.process import terminal
from tfdist.process.status_line import showing


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def test_it_is_erased_on_a_terminal_and_not_written_elsewhere(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen, file = Terminal(), io.StringIO()
    for stream in (screen, file):
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(OSError), showing("Loading ..."):
            raise OSError
    assert screen.getvalue() == f"Loading ...\r{' ' * 11}\r" and not file.getvalue()


def test_a_launcher_reads_no_more_than_its_terminal_has_room_for(monkeypatch):
    monkeypatch.setenv(terminal.LAUNCHER_VARIABLE, "7")
    read, write = os.pipe()
    with os.fdopen(read) as shown, os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        with showing("Loading ..."):
            pass
        pipe.close()
        assert shown.read().splitlines() == ["Loading", " " * 7]


def test_a_closed_terminal_ends_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    screen.write = lambda text: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    monkeypatch.setattr(sys, "stderr", screen)
    with showing("Loading ..."):
        pass
