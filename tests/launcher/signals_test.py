import os
import signal
import subprocess
import sys

import pytest

from tfdist.launcher import orphan_guard
from tfdist.launcher.orphan_guard import collect_signals

pytestmark = [pytest.mark.processes, pytest.mark.waits]

SAYS = "import signal; print(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, signal.getsignal(signal.SIGTERM))"


def test_signals_are_collected_in_their_order_and_do_what_they_did_afterwards(monkeypatch):
    before, now = signal.getsignal(signal.SIGTERM), [100.0]
    monkeypatch.setattr(orphan_guard.time, "monotonic", lambda: now[0])
    arrived: list[int] = []
    with collect_signals(arrived):
        for number, at in ((signal.SIGTERM, 0.0), (signal.SIGHUP, 0.9), (signal.SIGUSR1, 1.5), (signal.SIGHUP, 1.6)):
            now[0] = 100.0 + at
            os.kill(os.getpid(), number)
        assert arrived == [signal.SIGTERM, signal.SIGHUP]
    assert signal.getsignal(signal.SIGTERM) == before and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_under_nohup_a_launcher_outlives_its_terminal():
    arrived: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with collect_signals(arrived):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert arrived == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_whoever_has_only_just_been_started_does_not_end_by_being_asked_where_it_is():
    with collect_signals([]):
        said = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=True).stdout
    assert said == f"True {signal.SIG_DFL:d}\n"
