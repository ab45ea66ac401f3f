import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.limits import files_of_at_most
from tests.waiting import read_line
from tfdist.checkpoint.format import LockError, lock
from tfdist.errors import InputError

HOLD = """
import sys
from tfdist.checkpoint.format import lock
with lock(sys.argv[1]):
    print("inside", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_told_of_the_first(tmp_path):
    days = [time.strftime("%Y-%m-%d", time.gmtime())]
    with lock(tmp_path):
        for _ in range(2):  # the refused one leaves the lock as it is
            with pytest.raises(InputError) as caught, lock(tmp_path):
                pass
    assert not (tmp_path / "lock").read_text()
    days.append(time.strftime("%Y-%m-%d", time.gmtime()))  # another one if it was midnight
    message = str(caught.value)
    for word in (str(tmp_path), "--output_dir"):
        assert word in message
    assert any(f"process {os.getpid()} on {socket.gethostname()} since {day}" in message for day in days)
    assert "\n" not in message
    with lock(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert read_line(holder.stdout) == "inside\n"
        with pytest.raises(InputError, match=f"process {holder.pid} on "), lock(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        with lock(tmp_path):
            assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_a_directory_that_cannot_be_locked_is_bad_input(tmp_path):
    with pytest.raises(LockError, match="lock: No such file or directory. Use another --output_dir"):
        with lock(tmp_path / "nowhere"):
            pass


def test_a_full_disk_is_no_reason_to_end(tmp_path):
    """The run may free space as soon as it holds the lock."""
    with contextlib.ExitStack() as stack:
        with files_of_at_most(5):
            stack.enter_context(lock(tmp_path))
        with pytest.raises(InputError, match="Only one run at a time"), lock(tmp_path):
            pass
    with lock(tmp_path):
        pass


def test_where_files_cannot_be_locked_the_words_are_there(tmp_path):
    with lock(tmp_path, exclusive=False):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
        with lock(tmp_path):
            pass
    assert not (tmp_path / "lock").read_text()
