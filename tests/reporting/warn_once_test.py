"""Warnings that are logged once per process."""

from tfdist.reporting.warn_once import warn_once as warn


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
