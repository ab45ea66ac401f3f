"""`make check`, `make test` and `make test-all`: which sessions they run, and what their last line says."""

import pathlib

import pytest

from tests import sessions
from tests.sessions import Counts


def test_what_waits_has_a_session_beside_what_computes():
    [first, second] = sessions.sessions("quick", ["--since=a1b2"])
    assert (first.marks, second.marks) == ("not waits and not full", "waits and not full")
    assert all({"--tier=quick", "--since=a1b2", "--dist=loadgroup"} <= {*one.options} for one in (first, second))
    assert "--numprocesses=4" in second.options
    [only] = sessions.sessions("plain", [])
    assert only.options[0] == "--tier=plain"


@pytest.mark.parametrize(
    ("tier", "found", "expected"),
    [
        ("quick", [Counts(5, 0, 30), Counts(2, 0, 4)], "7 tests passed in 4.5 min; make test-all has 34 more"),
        ("quick", [Counts(5, 3, 30)], "5 tests passed in 4.5 min, 3 skipped; make test-all has 30 more"),
        ("all", [Counts(5, 0, 0)], "5 tests passed in 4.5 min"),
    ],
)
def test_the_last_line_counts(tier: str, found: list[Counts], expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions.importlib.util, "find_spec", lambda name: name)
    assert sessions.summary(found, 4.49, tier) == expected


@pytest.fixture
def session(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> sessions.Session:
    """A session that has ended: 9 tests, of which 2 were skipped and 3 did not pass; 40 were left out."""
    monkeypatch.setattr(sessions, "REPORTS", tmp_path)
    session = sessions.Session("quick", "not full", ())
    suite = '<testsuites><testsuite tests="9" skipped="2" failures="1" errors="2"/></testsuites>'
    sessions.report(session).write_text(suite)
    left_out = tmp_path / "v" / sessions.tiers.LEFT_OUT / "not full"
    left_out.parent.mkdir(parents=True)
    left_out.write_text("40")
    return session


def test_counts_come_from_the_report_and_the_cache_of_pytest(session):
    assert sessions.counts(session) == Counts(4, 2, 40)
