"""A forked program behaves like a started one: arguments, environment, directory, output, exit code, signals."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import fork_server
from tfdist.testing import processes

pytestmark = pytest.mark.processes

PROGRAM = """
import atexit, json, os, sys, threading
atexit.register(print, "at exit")
threading.Timer(0.2, print, ["a thread"]).start()
print(json.dumps([sys.argv[1:], __name__, os.getcwd(), os.environ["MINE"], sys.stdin.read(), os.getsid(0) == os.getpid()]))
print("to standard error", file=sys.stderr)
"""
ENDS = {
    "": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit('a word')": 1,
    "raise ValueError('wrong')": 1,
    "import os; os._exit(5)": 5,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "raise KeyboardInterrupt": -signal.SIGINT,
}


@pytest.fixture(scope="module")
def servers() -> Iterator[fork_server.Servers]:
    made = fork_server.Servers()
    yield made
    made.close()


def both(servers, command, tmp_path, **variables):
    """Returns exit code and output of a command, once forked and once started."""
    ends = []
    for start in (servers.start, processes.start):
        with open(tmp_path / "output", "wb") as file:
            process = start([sys.executable, *command], {**os.environ, **variables}, file)
        ends.append((process.wait(timeout=60), (tmp_path / "output").read_text()))
    return ends


@pytest.mark.parametrize("form", ["file", "module", "code"])
def test_a_program_sees_what_it_would_see(form, servers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(PROGRAM)
    command = {"file": ["own.py"], "module": ["-m", "own"], "code": ["-c", PROGRAM]}[form]
    forked, started = both(servers, [*command, "--flag", "two words"], tmp_path, MINE="1")
    assert forked == started
    assert started[0] == 0 and "two words" in started[1]


@pytest.mark.parametrize("code", ENDS)
def test_a_program_ends_as_it_would_end(code, servers, tmp_path):
    (tmp_path / "own.py").write_text(code)
    forked, started = both(servers, [str(tmp_path / "own.py")], tmp_path)
    assert (forked[0], started[0]) == (ENDS[code], ENDS[code])
    assert forked[1].splitlines()[-1:] == started[1].splitlines()[-1:]


def test_a_process_can_be_killed_and_waited_for(servers, tmp_path):
    with open(tmp_path / "output", "wb") as file:
        process = servers.start([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, file)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.1)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(timeout=10) == process.poll() == -signal.SIGKILL
    process.kill()  # has no effect on a process that has ended


def test_what_imports_read_has_a_server_of_its_own(servers, tmp_path):
    """Keras reads its configuration when it is imported."""
    (tmp_path / "keras.json").write_text('{"floatx": "float64", "backend": "tensorflow"}')
    code = "import keras; print(keras.config.floatx())"
    (forked, said), _ = both(servers, ["-c", code], tmp_path, KERAS_HOME=str(tmp_path))
    assert (forked, said.strip()) == (0, "float64")


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ([sys.executable, "-m", "a"], True),
        ([sys.executable, "a.py", "-x"], True),
        ([sys.executable, "-I", "a.py"], False),
        ([sys.executable], False),
        (["sh", "a.py"], False),
    ],
)
def test_what_can_be_forked(command, answer):
    assert fork_server.can_fork(command) == answer
