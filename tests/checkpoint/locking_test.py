import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tfdist.checkpoint import lock
from tfdist.errors import InputError

HOLD = """
import sys
from tfdist.checkpoint import lock
with lock(sys.argv[1]):
    print("inside", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_told_of_the_first(tmp_path):
    with lock(tmp_path), pytest.raises(InputError) as caught, lock(tmp_path):
        pass
    message = str(caught.value)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    for word in (str(tmp_path), f"process {os.getpid()} on {socket.gethostname()} since {today}", "--output_dir"):
        assert word in message
    assert "\n" not in message
    with lock(tmp_path):
        pass


def test_the_refused_one_leaves_the_lock_as_it_is(tmp_path):
    with lock(tmp_path):
        for _ in range(2):
            with pytest.raises(InputError, match=f"process {os.getpid()}"), lock(tmp_path):
                pass
    assert not (tmp_path / "lock").read_text()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "inside\n"
        with pytest.raises(InputError, match=f"process {holder.pid} on "), lock(tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        with lock(tmp_path):
            assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_an_error_inside_gives_the_lock_back(tmp_path):
    with pytest.raises(KeyError), lock(tmp_path):
        raise KeyError
    with lock(tmp_path):
        pass


def test_a_directory_that_cannot_be_locked_is_bad_input(tmp_path):
    with pytest.raises(InputError, match="lock: No such file or directory. Give another --output_dir"):
        with lock(tmp_path / "nowhere"):
            pass
