import logging

import pytest

from tfdist.coordination.messages import MAX_LINE_LENGTH, MAX_LINES, LimitedLog


@pytest.fixture
def log(clock):
    return LimitedLog(logging.getLogger("tfdist.coordination"), clock)


def test_the_first_lines_are_written_and_the_others_counted(log, clock, caplog):
    for _ in range(3):
        caplog.clear()
        for number in range(1000):
            log.warning(f"number {number}")
        assert caplog.messages[-MAX_LINES:] == [f"number {number}" for number in range(MAX_LINES)]
        clock.now += 60.0
    assert caplog.messages[0] == f"... and {1000 - MAX_LINES} more lines about connections in the last minute"


def test_nothing_is_left_uncounted(log, clock, caplog):
    for _ in range(MAX_LINES + 2):
        log.warning("x")
    log.summarize()
    assert len(caplog.messages) == MAX_LINES
    clock.now += 60.0
    log.summarize()
    log.summarize()
    assert caplog.messages[MAX_LINES:] == ["... and 2 more lines about connections in the last minute"]
    log.summarize(force=True)  # nothing is left out since then
    for _ in range(MAX_LINES + 1):
        log.warning("x")
    log.summarize(force=True)
    assert caplog.messages[-1] == "... and 1 more lines about connections in the last minute"


def test_warnings_hide_no_error(log, caplog):
    for _ in range(100):
        log.warning("x")
    try:
        raise ValueError("a\x1b[31m\nb")
    except ValueError as error:
        log.error("One could not be served", error)
    text = caplog.messages[-1]
    assert text.startswith("One could not be served (ValueError: a\\x1b[31m\\nb)\n") and "limited_log_test.py" in text


def test_lines_are_short_and_without_control_characters(log, caplog):
    log.warning("a\r\n\x1b]0;\x07\x9b\u202eb\ud800é" + "\x00" * 10_000)
    (line,) = caplog.messages
    assert (
        line.startswith(r"a\r\n\x1b]0;\x07\x9b\u202eb\ud800é") and line.isprintable() and len(line) == MAX_LINE_LENGTH
    )
