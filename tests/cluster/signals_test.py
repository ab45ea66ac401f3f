"""Nested contexts that handle signals; preemption_test.py tests with real processes that they do so immediately."""

import os
import signal
import threading
import time

import pytest

from tfdist.cluster import signals

pytestmark = [pytest.mark.processes, pytest.mark.waits]


@pytest.fixture
def heard():
    """A list of the handled signals, with a method to wait for them."""

    class Heard(list):
        def __init__(self):
            self.news = threading.Condition()

        def by(self, who):
            def note(number):
                with self.news:
                    self.append((who, signal.Signals(number).name))
                    self.news.notify_all()

            return note

        def wait_for(self, count):
            with self.news:
                assert self.news.wait_for(lambda: len(self) >= count, 10.0), self

    return Heard()


def send(number):
    os.kill(os.getpid(), number)


def test_each_block_hears_its_own_signals_and_the_inner_one_those_of_both(heard):
    outer = {number: heard.by("outer") for number in (signal.SIGUSR1, signal.SIGUSR2)}
    with signals.handle_signals(outer):
        with signals.handle_signals({signal.SIGUSR2: heard.by("inner")}):
            send(signal.SIGUSR1)
            heard.wait_for(1)
            send(signal.SIGUSR2)
            heard.wait_for(2)
        send(signal.SIGUSR2)
        heard.wait_for(3)
    assert heard == [("outer", "SIGUSR1"), ("inner", "SIGUSR2"), ("outer", "SIGUSR2")]


def test_what_came_before_the_end_of_a_block_is_heard(heard):
    for _ in range(20):
        with signals.handle_signals({signal.SIGUSR1: heard.by("one")}):
            send(signal.SIGUSR1)
    assert len(heard) == 20


def test_an_error_in_a_callback_is_logged_and_the_next_signal_heard(heard, caplog):
    def fails(number):
        heard.by("one")(number)
        raise KeyError("lost")

    with signals.handle_signals({signal.SIGUSR1: fails}):
        send(signal.SIGUSR1)
        heard.wait_for(1)
        send(signal.SIGUSR1)
        heard.wait_for(2)
    assert caplog.text.count("Handling SIGUSR1 failed") == 2


def test_a_forked_process_ends_by_signals_as_usual(heard):
    """As `multiprocessing.Process.terminate` requires; the parent does not hear them."""
    reading, writing = os.pipe()
    with (
        signals.handle_signals({signal.SIGTERM: heard.by("outer")}),
        signals.handle_signals({signal.SIGTERM: heard.by("inner")}),
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
        heard.wait_for(1)
    assert heard == [("inner", "SIGTERM")]
    os.close(reading)
    os.close(writing)
