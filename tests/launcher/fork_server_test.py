"""A forked program behaves like a started one: arguments, environment, directory, output, exit code, signals."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests import fork_server
from tests.launcher.launching import ends
from tests.waiting import DEADLINE, wait_for
from tfdist.launcher.fork_server import ForkServer, can_fork
from tfdist.testing import processes

pytestmark = pytest.mark.processes

PROGRAM = """
import atexit, json, os, sys, threading
atexit.register(print, "at exit")
done = threading.Event()
threading.Thread(target=lambda: done.wait() and print("a thread")).start()
print(json.dumps([sys.argv[1:], __name__, os.getcwd(), os.environ["MINE"], sys.stdin.read(), os.getsid(0) == os.getpid()]))
print("to standard error", file=sys.stderr)
done.set()
"""
ENDS = {
    "": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit('a word')": 1,
    "raise ValueError('wrong')": 1,
    "import os; os._exit(5)": 5,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "import atexit; atexit.register(print, 'at exit'); raise KeyboardInterrupt": -signal.SIGINT,
    "import sys; sys.exit('caf\\udce9')": 1,
    "raise ValueError('caf\\udce9')": 1,
    "from tfdist import errors; raise errors.InputError('wrong')": 2,
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
        ends.append((process.wait(timeout=DEADLINE), (tmp_path / "output").read_text()))
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
    """In the environment of a launcher, where errors of tfdist have exit codes of their own."""
    (tmp_path / "own.py").write_text(code)
    forked, started = both(servers, [str(tmp_path / "own.py")], tmp_path, TFDIST_LAUNCHER_ID="1")
    assert (forked[0], started[0]) == (ENDS[code], ENDS[code])
    assert forked[1].splitlines()[-1:] == started[1].splitlines()[-1:]


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "raise ValueError('wrong')"])
def test_the_end_of_a_program_is_known_before_its_threads_end(end, servers, tmp_path):
    known = "lambda error: print('known:', repr(error)) or os._exit(4)"
    begin = f"import os, threading, time\nfrom tfdist.process import exit_status\nexit_status.at_end({known})\n"
    (tmp_path / "own.py").write_text(f"{begin}threading.Thread(target=time.sleep, args=(600,)).start()\n{end}")
    with open(tmp_path / "output", "wb") as file:
        process = servers.start([sys.executable, str(tmp_path / "own.py")], os.environ, file)
    assert process.wait(timeout=DEADLINE) == 4
    assert (tmp_path / "output").read_text().splitlines()[-1] == f"known: {end.removeprefix('raise ')}"


def test_what_was_not_flushed_is_written_at_the_end(servers, tmp_path):
    (tmp_path / "own.py").write_text("import sys\nfile = open(sys.argv[1], 'w')\nfile.write('one')\n")
    for start, name in ((servers.start, "forked"), (processes.start, "started")):
        with open(tmp_path / "output", "wb") as output:
            process = start([sys.executable, str(tmp_path / "own.py"), str(tmp_path / name)], os.environ, output)
        assert process.wait(timeout=DEADLINE) == 0
        assert (tmp_path / name).read_text() == "one"


def test_a_hook_for_errors_that_fails_hides_none(servers, tmp_path):
    hook = "import sys\ndef hook(*error):\n    raise KeyError('in the hook')\nsys.excepthook = hook\n"
    (tmp_path / "own.py").write_text(f"{hook}raise ValueError('wrong')\n")
    for code, output in both(servers, [str(tmp_path / "own.py")], tmp_path):
        assert code == 1
        expected = (
            "Error in sys.excepthook:",
            "KeyError: 'in the hook'",
            "Original exception was:",
            "ValueError: wrong",
        )
        places = [output.index(each) for each in expected]
        assert places == sorted(places)


def test_a_process_can_be_killed_and_waited_for(servers, tmp_path):
    with open(tmp_path / "output", "wb") as file:
        process = servers.start([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, file)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.1)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(timeout=DEADLINE) == process.poll() == -signal.SIGKILL
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
        ([os.path.basename(sys.executable), "a.py"], True),  # found on PATH
        ([sys.executable, "-I", "a.py"], False),
        ([sys.executable, "-m"], False),
        ([sys.executable], False),
        (["sh", "a.py"], False),
        ([os.path.realpath(sys.executable), "a.py"], False),  # the same file, but without the virtual environment
        (["no-such-program", "a.py"], False),
    ],
)
def test_what_can_be_forked(command, answer):
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    assert can_fork(command, {"PATH": path}) == answer


def traceback_of(output: str) -> list[str]:
    """Returns the lines of a traceback from the program's first own one."""
    lines = output.splitlines()
    return lines[next(i for i, line in enumerate(lines) if "own.py" in line) :]


def test_a_traceback_has_no_line_of_the_server(servers, tmp_path):
    (tmp_path / "own.py").write_text("def fail():\n    raise ValueError('wrong')\nfail()\n")
    (_, forked), (_, started) = both(servers, [str(tmp_path / "own.py")], tmp_path)
    assert "fork_program" not in forked
    assert traceback_of(forked) == traceback_of(started)


def test_forks_draw_different_random_numbers(tmp_path):
    """Imports have seeded generators, and the forks of a server would draw the same numbers."""
    draws = "np.random.rand(), random.random(), keras.random.uniform(()), tf.random.uniform(())"
    code = f"import random, keras, numpy as np, tensorflow as tf; print(*(float(value) for value in ({draws})))"
    drawn = []
    with ForkServer(["tensorflow", "keras"], os.environ) as server:
        for number in range(3):
            with open(tmp_path / str(number), "wb") as file:
                process = server.start([sys.executable, "-c", code], os.environ, file.fileno(), file.fileno())
            assert process.has_ended(DEADLINE) and process.poll() == 0 and process.reap(0)
            drawn.append((tmp_path / str(number)).read_text().splitlines()[-1].split())
    assert [len(set(values)) for values in zip(*drawn, strict=True)] == [3, 3, 3, 3]


def started(server: ForkServer, code: str):
    return server.start([sys.executable, "-c", code], os.environ, 1, 2)


def test_signals_that_end_a_job_do_not_end_the_server():
    with ForkServer([], os.environ) as server:
        first = started(server, "import time; time.sleep(600)")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(server.pid, number)
        os.kill(first.pid, signal.SIGTERM)
        assert first.has_ended(DEADLINE) and first.poll() == -signal.SIGTERM
        second = started(server, "raise SystemExit(3)")
        assert second.has_ended(DEADLINE) and second.poll() == 3
        for process in (first, second):
            process.reap(0)


def test_a_process_id_is_reserved_until_it_is_reaped():
    with ForkServer([], os.environ) as server:
        process = started(server, "pass")
        assert process.has_ended(DEADLINE)
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        assert process.reap(0)
        wait_for(lambda: not psutil.pid_exists(process.pid))


def test_the_processes_of_a_killed_server_are_killed():
    """Their exit codes would be lost."""
    with ForkServer([], os.environ) as server:
        process = started(server, "import time; time.sleep(600)")
        os.kill(server.pid, signal.SIGKILL)
        assert process.has_ended(DEADLINE) and process.poll() == -signal.SIGKILL
        with pytest.raises(OSError):
            started(server, "pass")
        process.reap(0)
    assert ends(process.pid)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('no such library')", "no such library"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "started threads",
        ),
    ],
)
def test_a_server_that_cannot_be_used_says_why(source, reason, tmp_path):
    (tmp_path / "imported.py").write_text(source)
    with ForkServer(["imported"], {**os.environ, "PYTHONPATH": str(tmp_path)}) as server:
        with pytest.raises(OSError, match=reason):
            started(server, "pass")
