"""A call that does not return: every rank is queried, and the job ends with code 4."""

import contextlib
import os
import re
import signal
import time
import types

import pytest

from tests.coordination.members import members
from tests.waiting import wait_for
from tfdist.coordination import LocalGroup
from tfdist.coordination.watchdog import Watchdog
from tfdist.errors import ExitCode

pytestmark = [pytest.mark.processes, pytest.mark.waits]

ANSWER_SECONDS = 4.0


@pytest.fixture
def groups():
    with members(3) as joined:
        yield joined


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A thread of a rank may not run for seconds, which is no silence here."""
    monkeypatch.setattr("tfdist.coordination.watchdog.ANSWER_SECONDS", ANSWER_SECONDS)


@pytest.fixture
def heard():
    """Collects reports and the exit codes of processes."""
    return types.SimpleNamespace(lines=[], codes=[])


def made(group, heard, warning=0.0, shutdown=0.0):
    report, end = heard.lines.append, heard.codes.append
    return Watchdog(group, warning_seconds=warning, shutdown_seconds=shutdown, print_report=report, end=end)


@contextlib.contextmanager
def watching(groups, heard, **seconds):
    """Yields the watchdogs of some ranks."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(made(group, heard, **seconds)) for group in groups]


@contextlib.contextmanager
def at_once(watchdog):
    """Makes what ranks report in the body one event for the threads that watch them, however long it takes."""
    with contextlib.ExitStack() as stack:
        for each in watchdog:
            stack.enter_context(each._condition)
        yield


def begin(watchdog, step, end):
    with at_once(watchdog):
        for each in watchdog:
            each.begin(step, end)


def one_call(watchdog, end):
    with at_once(watchdog):
        begin(watchdog, end - 1, end)
        for each in watchdog:
            each.end_call(end)


def test_who_has_not_come_is_named(groups, heard):
    with watching(groups, heard, warning=0.3) as watchdog:
        one_call(watchdog, 10)
        groups[2].describe_wait = lambda: "server 0 (rank 3)"
        begin(watchdog[::2], 10, 20)  # rank 1 is elsewhere
        wait_for(lambda: heard.lines)
        time.sleep(0.5)
        for each in watchdog:
            each.end_call(20)
    assert len(heard.lines) == 1  # although both waiting ranks have queried
    assert "in a call: 0, 2; not in a call: 1." in heard.lines[0]
    assert re.search(r"the call from step 10 to 20 has lasted \S+ s on rank", heard.lines[0])
    assert "rank 1: step 10, between two calls\n" in heard.lines[0]
    assert "in the call from step 10 to 20, waiting for server 0 (rank 3)\n" in heard.lines[0]
    assert "watchdog_test.py" in heard.lines[0]
    assert not heard.codes


@pytest.mark.parametrize("silent, others", [(2, "0, 1"), (0, "1, 2")])
def test_a_rank_that_is_silent_is_named(groups, silent, others, heard):
    """The rank is suspended, or holds the GIL; here it has no watchdog."""
    with watching([each for each in groups if each.rank != silent], heard) as watchdog:
        one_call(watchdog, 5)
        watchdog[0].report("somebody asked")
        wait_for(lambda: heard.lines)
    assert f"(somebody asked). not in a call: {others}; no answer: {silent}." in heard.lines[0]


def test_a_signal_asks_too_and_is_whose_it_was_afterwards(groups, heard):
    before = signal.getsignal(signal.SIGUSR1)
    with watching(groups, heard) as watchdog:
        one_call(watchdog, 5)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: heard.lines)
    assert "(SIGUSR1 to rank 2). not in a call: 0, 1, 2." in heard.lines[0]  # of the watchdog that was entered last
    assert signal.getsignal(signal.SIGUSR1) is before


def test_past_the_limit_all_end_with_code_4(groups, heard):
    with watching(groups, heard, shutdown=0.3) as watchdog:
        one_call(watchdog, 10)
        watchdog[1].begin(10, 20)
        wait_for(lambda: len(heard.codes) == 3)
    assert set(heard.codes) == {ExitCode.STALLED}
    (report,) = (line for line in heard.lines if line.startswith("State of the ranks"))
    ends = [line for line in heard.lines if line != report]
    assert "in a call: 1; not in a call: 0, 2." in report
    why = r"the call from step 10 to 20 has lasted \S+ s, as long as --stall_shutdown_seconds allows\. Ending with code 4\."
    for rank, end in enumerate(sorted(ends)):
        assert re.fullmatch(rf"rank {rank} of 3: {why}", end)
    assert len(ends) == 3


@pytest.mark.parametrize("warning", [0.1, 0.0])
def test_the_first_call_may_compile_as_long_as_it_wants(groups, warning, heard):
    """All ranks are in it: reported once, after the limit that ends other calls, also with warnings disabled."""
    with watching(groups, heard, warning=warning, shutdown=0.2) as watchdog:
        begin(watchdog, 0, 10)
        wait_for(lambda: heard.lines)
        time.sleep(ANSWER_SECONDS + 0.5)
        for each in watchdog:
            each.end_call(10)
    assert len(heard.lines) == 1
    assert all("has lasted 0.2 s" in line and "in a call: 0, 1, 2." in line for line in heard.lines)
    assert heard.codes == []


def test_who_has_not_come_to_the_first_call_is_named(groups, heard):
    """Reported once for each change, such as the arrival of another late rank; no process is ended."""
    with watching(groups, heard, warning=0.3, shutdown=60.0) as watchdog:
        watchdog[0].begin(0, 10)
        wait_for(lambda: heard.lines)
        watchdog[1].begin(0, 10)
        wait_for(lambda: len(heard.lines) == 2)
        time.sleep(ANSWER_SECONDS + 1.0)
    assert re.search(
        r"\(the call from step 0 to 10 has lasted 0\.3 s on rank 0\)\. in a call: 0; not in a call: 1, 2\.",
        heard.lines[0],
    )
    assert "in a call: 0, 1; not in a call: 2." in heard.lines[1]
    assert "rank 2: step 0, between two calls" in heard.lines[1]
    assert len(heard.lines) == 2
    assert not heard.codes


def test_a_late_rank_that_repeats_queries_changes_no_report(groups, heard):
    """The queries of two ranks, which began the same call at different times, are distinct."""
    with watching(groups, heard, warning=0.3) as watchdog:
        watchdog[0].begin(0, 10)
        time.sleep(ANSWER_SECONDS / 2 - 0.05)
        watchdog[1].begin(0, 10)
        time.sleep(2 * ANSWER_SECONDS)
    assert ["in a call: 0; not in a call: 1, 2." in line for line in heard.lines] == [True, False]
    assert "in a call: 0, 1; not in a call: 2." in heard.lines[1]


def test_who_has_not_come_to_the_run_is_named_and_says_nothing_of_it_later(groups, heard):
    """A late rank receives the queries from before it joined."""
    late = types.SimpleNamespace(lines=[], codes=[])
    with watching(groups[1:], heard, warning=0.3) as rest:
        begin(rest, 0, 10)
        wait_for(lambda: heard.lines)
        with made(groups[0], late, warning=0.3) as first:
            wait_for(lambda: first._last_query == rest[0]._last_query)  # it has answered what was asked before
            first.begin(0, 10)
            time.sleep(ANSWER_SECONDS + 0.5)
    assert "in a call: 1, 2; no answer: 0." in heard.lines[0]
    assert late.lines == []


def test_calls_that_end_in_time_say_nothing(groups, heard):
    with watching(groups, heard, warning=4.0, shutdown=4.5) as watchdog:
        for end in range(1, 50):
            for each in watchdog:
                each.begin(end - 1, end)
            time.sleep(0.1)
            for each in watchdog:
                each.end_call(end)
    assert (heard.lines, heard.codes) == ([], [])


def test_slow_steps_are_no_stall(monkeypatch, clock, heard):
    """The limit is added to twice the time of the slowest call so far, for the same number of steps."""
    monkeypatch.setattr("tfdist.coordination.watchdog.time", types.SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with made(LocalGroup(), heard, warning=0.2) as watchdog:
        for end in (1, 2):
            with at_once([watchdog]):
                watchdog.begin(end - 1, end)
                clock.now += 0.4
                watchdog.end_call(end)
        began = time.monotonic()
        watchdog.begin(2, 4)  # 2 * 2 * 0.4 + 0.2 s are allowed
        wait_for(lambda: heard.lines)
        assert time.monotonic() - began > 1.7 + ANSWER_SECONDS
        watchdog.end_call(4)
    assert "the call from step 2 to 4 has lasted 1.8 s" in heard.lines[0] and "in a call: 0." in heard.lines[0]
