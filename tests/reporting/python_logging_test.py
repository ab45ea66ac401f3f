"""Log lines on the terminal and in files, and warnings that are logged once per process."""

import io
import logging
import re
import sys

import pytest
from absl import logging as absl_logging

from tfdist.errors import NotFiniteError, WriteError
from tfdist.reporting import python_logging
from tfdist.reporting.warn_once import warn_once as warn

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) rank (\d+): (.*)")


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    loggers = [logging.getLogger(name) for name in (None, "tfdist", "tensorflow")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    assert [(logger.level, list(logger.handlers)) for logger in loggers] == before


def lines(text: str) -> list[tuple[str, ...]]:
    matches = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(matches), text
    return [match.groups() for match in matches if match]


def speak():
    logging.getLogger("tfdist.trainer.trainer").debug("too much")
    logging.getLogger("tfdist.trainer.trainer").info("started")
    logging.getLogger("somebody.else").info("chatter")
    logging.getLogger("somebody.else").warning("careful")


@pytest.mark.parametrize("rank", [0, 2])
def test_the_chief_shows_what_is_in_its_file_and_other_ranks_warnings_only(rank, tmp_path, capsys):
    path = tmp_path / "logs" / "rank.log"
    with python_logging.setup(rank, path):
        speak()
    expected = [("INFO", f"{rank}", "started"), ("WARNING", f"{rank}", "careful")]
    assert lines(path.read_text()) == expected
    assert lines(capsys.readouterr().err) == (expected[1:] if rank else expected)


def test_a_line_is_in_the_file_at_once_and_close_ends_it(tmp_path, capsys):
    path = tmp_path / "rank-0.log"
    handlers = python_logging.setup(0, path)
    speak()
    assert len(lines(path.read_text())) == 2
    handlers.close()
    logging.getLogger("tfdist").error("after the end")
    assert len(lines(path.read_text())) == 2


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (NotFiniteError("The loss is nan\n at 100% of the steps."), "The loss is nan at 100% of the steps."),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_error_that_ends_the_block_is_in_the_file_alone(tmp_path, capsys, error, line):
    path = tmp_path / "rank-1.log"
    with pytest.raises(type(error)), python_logging.setup(1, path):
        raise error
    assert lines(path.read_text()) == [("ERROR", "1", line)]
    assert capsys.readouterr().err == ""


def test_an_error_that_nobody_expected_is_in_the_file_with_its_traceback(tmp_path, capsys):
    path = tmp_path / "rank-0.log"
    with pytest.raises(ZeroDivisionError), python_logging.setup(0, path):
        speak()
        raise ZeroDivisionError("by zero")
    assert "ERROR rank 0: by zero\nTraceback (most recent call last):\n" in path.read_text()
    assert path.read_text().endswith("ZeroDivisionError: by zero\n")
    assert "by zero" not in capsys.readouterr().err


@pytest.mark.parametrize("name", [None, "tensorflow"])
def test_no_line_appears_twice_on_the_terminal(tmp_path, capsys, name):
    theirs = logging.StreamHandler(sys.stderr)
    absls = absl_logging.ABSLHandler(absl_logging.PythonFormatter())
    absls.python_handler.stream = sys.stderr
    logger = logging.getLogger(name)
    for handler in (theirs, absls):
        logger.addHandler(handler)
    try:
        with python_logging.setup(0, tmp_path / "rank-0.log"):
            logging.getLogger("tensorflow").warning("careful")
        assert lines(capsys.readouterr().err) == [("WARNING", "0", "careful")]
        assert {theirs, absls} <= set(logger.handlers)
    finally:
        for handler in (theirs, absls):
            logger.removeHandler(handler)


def test_handlers_that_write_elsewhere_stay(tmp_path, capsys):
    elsewhere = io.StringIO()
    handler = logging.StreamHandler(elsewhere)
    logging.getLogger().addHandler(handler)
    try:
        with python_logging.setup(0, tmp_path / "rank-0.log"):
            logging.getLogger("tfdist").info("started")
        assert elsewhere.getvalue() == "started\n"
    finally:
        logging.getLogger().removeHandler(handler)


def test_a_file_that_cannot_be_opened_changes_nothing(tmp_path, capsys):
    with pytest.raises(WriteError, match="Is a directory"):
        python_logging.setup(0, tmp_path)


def test_a_text_is_logged_once(caplog):
    for text in ("first", "second", "first"):
        warn(text)
    assert [record.getMessage() for record in caplog.records] == ["first", "second"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_of_several_texts_about_a_situation_the_first_is_logged(caplog):
    for text in ("first", "second", "first"):
        warn(text, situation="the same")
    assert [record.getMessage() for record in caplog.records] == ["first"]


def test_a_percent_sign_is_no_format(caplog):
    warn("100% of the data")
    assert caplog.messages == ["100% of the data"]
