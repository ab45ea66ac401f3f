import contextlib
import errno
import io
import os

import pytest

from tfdist.cluster import terminal
from tfdist.cluster.terminal import StatusLine
from tfdist.launcher.output_forwarding import Channel, Screen


class Notebook(io.StringIO):
    """An output stream without an underlying byte stream."""


class Failing(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


def bytes_stream():
    raw = io.BytesIO()
    return raw, io.TextIOWrapper(raw, encoding="ascii")


@pytest.fixture
def pipe():
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb", buffering=0) as writer:
        yield reader, writer


def test_lines_stand_behind_their_rank_and_the_log_has_the_bytes(pipe):
    raw, stream = bytes_stream()
    stream.write("printed before ")
    log = io.BytesIO()
    channel = Channel(3, pipe[0], Screen(stream), log)
    pipe[1].write(b"one\ntw\xff")
    assert channel.forward()
    assert channel.forward()  # nothing has arrived, but there may be more
    pipe[1].close()
    assert not channel.forward()
    channel.close()
    assert raw.getvalue() == b"printed before [3] one\n[3] tw\xff\n"
    assert log.getvalue() == b"one\ntw\xff"


def test_a_stream_without_bytes_gets_text():
    stream = Notebook()
    Screen(stream).write(b"caf\xc3\xa9 \xff")
    assert stream.getvalue() == "café \ufffd\n"


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, ""), OSError(errno.EIO, "")])
def test_a_screen_that_nobody_reads_says_so(error):
    screen = Screen(Failing(error))
    screen.write(b"x")
    assert screen.is_broken
    screen.write(b"y")


def test_what_finds_no_room_on_a_screen_is_lost():
    with contextlib.suppress(OSError), open("/dev/full", "w") as stream:  # closing it fails, too
        screen = Screen(stream)
        screen.write(b"x")
        screen.write(b"y")
    assert not screen.is_broken
    screen = Screen(Failing(BlockingIOError(errno.EAGAIN, "")))
    screen.write(b"x")
    assert not screen.is_broken


def test_an_incomplete_line_is_shown_below_and_the_log_has_what_remains(pipe, monkeypatch):
    monkeypatch.setattr(terminal, "columns_of", lambda stream: 10)
    raw, stream = bytes_stream()
    status, log = StatusLine(stream), io.BytesIO()
    channel = Channel(0, pipe[0], Screen(stream, status), log, status)
    for written in (b"first\n10%\r", b"20%, too long\r", b"warning\n", b"\x1b[32m30%\x1b[0m\r"):
        pipe[1].write(written)
        assert channel.forward()
    Screen(stream, status).write(b"[1] other")
    pipe[1].write(b"40%  \r\n")
    channel.forward()
    channel.close()
    erase = b"\r\x1b[2K"
    shown = [b"[0] first\n", b"10%", b"20%, too l", b"", b"[0] warning\n", b"30%", b"", b"[1] other\n30%"]
    assert raw.getvalue() == erase.join([shown[0] + erase + shown[1], *shown[2:4]]) + shown[4] + erase + shown[5] + (
        erase + shown[7] + erase + b"[0] 40%\n"
    )
    assert log.getvalue() == b"first\nwarning\n40%\n"
