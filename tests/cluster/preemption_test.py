"""Preemption notices are handled immediately, whatever the main thread is doing; real processes and signals."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.waiting import DEADLINE, read_line
from tfdist.cluster.signals import TOGETHER_SECONDS, termination_notices

pytestmark = [pytest.mark.processes, pytest.mark.waits]

PROGRAM = """
import ctypes, os, signal, sys, threading, time
from tfdist.cluster.signals import termination_notices
def heard(name):
    print("heard", name, flush=True)
{before}
with termination_notices({callback}):
    print("ready", flush=True)
    {body}
print("done", flush=True)
"""


class Program:
    def __init__(self, body: str, before: str, callback: str):
        command = [sys.executable, "-c", PROGRAM.format(body=body, before=before, callback=callback)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.line() == "ready\n"

    def line(self) -> str:
        return read_line(self.process.stdout)

    def end(self) -> tuple[int, str, str]:
        """Lets a body that `WAITS` go on; returns the exit code and the outputs."""
        out, err = self.process.communicate("\n", timeout=DEADLINE)
        return self.process.returncode, out, err


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def create(body: str, before: str = "", callback: str = "heard") -> Program:
        started.append(Program(body, before, callback))
        return started[-1]

    yield create
    for one in started:
        one.process.kill()
        one.process.communicate(timeout=DEADLINE)


WAITS = "sys.stdin.readline()"
# The main thread waits for a lock in C, which no signal interrupts, as in an engine's collective.
INSIDE = (
    "libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64); libc.pthread_mutex_lock(lock); "
    "libc.pthread_mutex_lock(lock)"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_notice_is_heard_at_once_while_the_main_thread_is_in_c(number: signal.Signals, program) -> None:
    one = program(INSIDE, callback="lambda name: (heard(name), libc.pthread_mutex_unlock(lock))")
    time.sleep(0.1)
    one.process.send_signal(number)
    assert one.line() == f"heard {number.name}\n"
    code, out, err = one.end()
    assert (code, out) == (0, "done\n")
    assert err == (
        f"Received {number.name}: saving and stopping at the next agreed step; a second signal exits at once.\n"
    )


@pytest.mark.parametrize(
    "first, second, callback",
    [
        ("SIGTERM", "SIGTERM", "heard"),
        ("SIGTERM", "SIGINT", "heard"),
        ("SIGINT", "SIGTERM", "lambda name: (heard(name), 1 / 0)"),  # an error in the callback is logged
    ],
)
def test_a_second_signal_ends_at_once_with_its_code(first: str, second: str, callback: str, program) -> None:
    one = program(INSIDE, callback=callback)
    one.process.send_signal(signal.Signals[first])
    assert one.line() == f"heard {first}\n"
    time.sleep(TOGETHER_SECONDS)
    one.process.send_signal(signal.Signals[second])
    code, out, err = one.end()
    assert (code, out) == (128 + signal.Signals[second], "")
    *logged, last = err.splitlines()[1:]
    assert last == f"Received {second} again: exiting at once."
    assert (logged[-1:] == ["ZeroDivisionError: division by zero"]) if "1 / 0" in callback else not logged


def test_under_a_launcher_no_signal_cuts_a_save_short(program) -> None:
    one = program(WAITS, before="os.environ['TFDIST_LAUNCHER_ID'] = 'any'")
    one.process.send_signal(signal.SIGTERM)
    assert one.line() == "heard SIGTERM\n"
    time.sleep(TOGETHER_SECONDS + 0.2)
    one.process.send_signal(signal.SIGTERM)
    code, out, err = one.end()
    assert (code, out) == (0, "done\n")
    assert [line.partition(";")[2] for line in err.splitlines()] == [
        " a second signal to the launcher exits at once."
    ] * 2


def test_a_signal_that_a_launcher_passes_on_besides_is_no_second_one(program) -> None:
    """`systemctl stop` and `scancel` signal every process of the job, including its launcher."""
    one = program(WAITS, before="from tfdist.cluster import signals as preemption; preemption.TOGETHER_SECONDS = 600.0")
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        one.process.send_signal(number)
        time.sleep(0.1)
    assert one.line() == "heard SIGTERM\n"
    code, out, err = one.end()
    assert (code, out, len(err.splitlines())) == (0, "done\n", 1)


FULL = """
os.set_blocking(2, False)
try:
    while True: os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
"""


@pytest.mark.parametrize("before", [FULL, "ctypes.CDLL(None).signal(15, ctypes.c_void_p(1))"])  # 1 is SIG_IGN
def test_a_notice_is_heard_whatever_the_engine_has_done(before: str, program) -> None:
    """Its warnings fill the pipe to a launcher that is stopped, and its handler, set by C's `signal`, is unknown to Python."""
    one = program(WAITS, before=before)
    one.process.send_signal(signal.SIGTERM)
    assert one.line() == "heard SIGTERM\n"
    code, out, _ = one.end()
    assert (code, out) == (0, "done\n")


def test_everything_is_as_before_afterwards() -> None:
    def handler(number: int, frame: object) -> None:
        arrived.append(number)

    arrived: list[int] = []
    noticed: list[str] = []
    before = signal.signal(signal.SIGTERM, handler)
    threads = {*threading.enumerate()}
    try:
        with termination_notices(noticed.append):
            os.kill(os.getpid(), signal.SIGTERM)
        assert noticed == ["SIGTERM"] and not arrived  # handled although the context exits right afterwards
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.set_wakeup_fd(-1) == -1 and {*threading.enumerate()} <= threads
        os.kill(os.getpid(), signal.SIGTERM)
        assert arrived == [signal.SIGTERM] and noticed == ["SIGTERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "name, handler, out",
    [
        ("SIGINT", "signal.SIG_IGN", ""),
        ("SIGUSR1", "lambda *_: os.write(1, b'own\\n')", "own\n"),  # `print` may be at work
    ],
)
def test_ignored_and_other_signals_are_handled_as_before(name: str, handler: str, out: str, program) -> None:
    one = program(WAITS, before=f"signal.signal(signal.{name}, {handler})")
    one.process.send_signal(signal.Signals[name])
    assert one.end() == (0, f"{out}done\n", "")


def test_in_another_thread_it_does_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def elsewhere() -> None:
        with termination_notices(lambda name: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[object] = []
    thread = threading.Thread(target=elsewhere, name="of a notebook")
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL] and "thread 'of a notebook'" in caplog.text
