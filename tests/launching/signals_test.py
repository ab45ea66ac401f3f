import os
import signal
import subprocess
import sys

from tfdist.launching.signals import received

SAYS = "import signal; print(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, signal.getsignal(signal.SIGTERM))"


def test_signals_are_collected_in_their_order_and_do_what_they_did_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with received((signal.SIGTERM, signal.SIGHUP)) as arrived:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert arrived == [signal.SIGHUP, signal.SIGTERM, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_whoever_has_only_just_been_started_does_not_end_by_being_asked_where_it_is():
    with received():
        said = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=True).stdout
    assert said == f"True {signal.SIG_DFL:d}\n"
