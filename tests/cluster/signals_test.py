"""Nested contexts that handle signals; preemption_test.py tests with real processes that they do so immediately."""

import os
import signal
import time

import pytest

from tests.waiting import wait_for
from tfdist.cluster import signals

pytestmark = [pytest.mark.processes, pytest.mark.waits]


@pytest.fixture
def heard():
    return []


def by(who, heard):
    """Returns a callback that notes signals, by the name of its block."""
    return lambda number: heard.append((who, signal.Signals(number).name))


def send(number):
    os.kill(os.getpid(), number)


def test_each_block_hears_its_own_signals_and_the_inner_one_those_of_both(heard):
    outer = {number: by("outer", heard) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    with signals.handle_signals(outer):
        with signals.handle_signals({signal.SIGUSR2: by("inner", heard)}):
            send(signal.SIGUSR1)
            wait_for(lambda: len(heard) == 1)
            send(signal.SIGUSR2)
            wait_for(lambda: len(heard) == 2)
        send(signal.SIGUSR2)
        wait_for(lambda: len(heard) == 3)
    assert heard == [("outer", "SIGUSR1"), ("inner", "SIGUSR2"), ("outer", "SIGUSR2")]


def test_what_came_before_the_end_of_a_block_is_heard(heard):
    for _ in range(20):
        with signals.handle_signals({signal.SIGUSR1: by("one", heard)}):
            send(signal.SIGUSR1)
    assert len(heard) == 20


def test_an_error_in_a_callback_is_logged_and_the_next_signal_heard(heard, caplog):
    def fails(number):
        by("one", heard)(number)
        raise KeyError("lost")

    with signals.handle_signals({signal.SIGUSR1: fails}):
        send(signal.SIGUSR1)
        wait_for(lambda: len(heard) == 1)
        send(signal.SIGUSR1)
        wait_for(lambda: len(heard) == 2)
    assert caplog.text.count("Handling SIGUSR1 failed") == 2


def test_a_forked_process_ends_by_signals_as_usual(heard):
    """As `multiprocessing.Process.terminate` requires; the parent does not hear them."""
    reading, writing = os.pipe()
    with (
        signals.handle_signals({signal.SIGTERM: by("outer", heard)}),
        signals.handle_signals({signal.SIGTERM: by("inner", heard)}),
    ):
        pid = os.fork()
        if pid == 0:
            os.write(writing, b"1")
            time.sleep(60)
            os._exit(0)
        assert os.read(reading, 1) == b"1"
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        send(signal.SIGTERM)
        wait_for(lambda: len(heard) == 1)
    assert heard == [("inner", "SIGTERM")]
    os.close(reading)
    os.close(writing)
