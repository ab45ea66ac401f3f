"""What a process shows: the columns of a terminal, a text while something loads, and lines that no closed stream blocks.

A launcher's line is covered by tests/launcher/output_forwarding_test.py.
"""

import fcntl
import io
import os
import struct
import sys
import termios

import pytest

from tfdist.cluster import terminal
from tfdist.cluster.signals import flush, print_line
from tfdist.cluster.terminal import show_temporarily
from tfdist.reporting.display import TerminalReporter, terminal_or_plain


@pytest.mark.parametrize(("text", "columns"), [("75", 75), ("", 0), ("wide", 0), ("-3", 0)])
def test_the_launcher_tells_the_columns(text, columns):
    assert terminal.launcher_columns({terminal.COLUMNS_VARIABLE: text}) == columns
    assert terminal.launcher_columns({}) == 0


@pytest.mark.parametrize(("term", "columns"), [("xterm", 79), ("dumb", 0), ("", 0)])
def test_a_terminal_has_its_columns_less_the_one_that_may_wrap(term, columns, monkeypatch):
    monkeypatch.setenv("TERM", term)
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(slave, "w") as stream, os.fdopen(master):
        assert terminal.columns_of(stream) == columns
        assert terminal.has_cursor_control(stream) is terminal.can_overwrite(stream) is bool(columns)
        assert isinstance(terminal_or_plain(stream), TerminalReporter) is bool(columns)
    assert terminal.columns_of(io.StringIO()) == 0


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def test_it_is_erased_on_a_terminal_and_not_written_elsewhere(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen, file = Terminal(), io.StringIO()
    for stream in (screen, file):
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(OSError), show_temporarily("Loading ..."):
            raise OSError
    assert screen.getvalue() == f"Loading ...\r{' ' * 11}\r" and not file.getvalue()


def test_a_launcher_reads_no_more_than_its_terminal_has_room_for(monkeypatch):
    monkeypatch.setenv(terminal.COLUMNS_VARIABLE, "7")
    read, write = os.pipe()
    with os.fdopen(read) as shown, os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        with show_temporarily("Loading ..."):
            pass
        pipe.close()
        assert shown.read().splitlines() == ["Loading", " " * 7]


def test_a_closed_terminal_ends_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    screen.write = lambda text: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    monkeypatch.setattr(sys, "stderr", screen)
    with show_temporarily("Loading ..."):
        pass


class Stream(io.StringIO):
    """Notes each write, as a stream without a buffer makes a system call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def test_a_line_and_its_end_are_one_write() -> None:
    stream = Stream()
    print_line("rank 0 is lost", stream)
    assert stream.writes == ["rank 0 is lost\n"]


@pytest.mark.parametrize("action", [lambda stream: print_line("line", stream), flush])
def test_a_closed_stream_is_no_error(action) -> None:
    stream = Stream()
    stream.close()
    action(stream)
