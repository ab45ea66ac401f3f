import io
import os

import pytest

from tfdist.launching.console import Channel, Screen


class Notebook(io.StringIO):
    """An output without bytes beneath it."""


class Closed(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


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
    assert channel.pump()
    assert channel.pump()  # nothing has arrived, and more may
    pipe[1].close()
    assert not channel.pump()
    channel.close()
    assert raw.getvalue() == b"printed before [3] one\n[3] tw\xff\n"
    assert log.getvalue() == b"one\ntw\xff"


def test_a_stream_without_bytes_gets_text():
    stream = Notebook()
    Screen(stream).write(b"caf\xc3\xa9 \xff")
    assert stream.getvalue() == "café \ufffd\n"


def test_a_screen_that_nobody_reads_says_so():
    screen = Screen(Closed())
    screen.write(b"x")
    assert screen.gone
    screen.write(b"y")
