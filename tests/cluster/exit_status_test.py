"""How a program ends is known as soon as its main thread has ended, although other threads and exit handlers do not end.

Errors of tfdist that a program does not catch end it with one line in a process of a launcher.
"""

import os
import pathlib
import pickle
import subprocess
import sys

import pytest

from tests.waiting import DEADLINE
from tfdist.cluster import exit_status
from tfdist.cluster.signals import LAUNCHER_VARIABLE

BEGINNING = """
import atexit, concurrent.futures, os, sys, threading, time
from tfdist.cluster import exit_status

def stay():
    time.sleep(1000)

def end(error):
    print(type(error).__name__, getattr(error, "code", error), file=sys.stderr)
    sys.stderr.flush()
    os._exit(9)

exit_status.add_callback(end)
"""
THREAD = "threading.Thread(target=stay).start()\n"
EXECUTOR = "concurrent.futures.ThreadPoolExecutor().submit(stay)\n"
HANDLER = "atexit.register(stay)\n"
HOOK = "sys.excepthook = lambda *error: print('in the hook', file=sys.stderr)\n"
MAIN = "def main():\n    {}\nsys.exit(main())\n"


def run(text: str, directory: pathlib.Path, **variables: str) -> tuple[int, list[str]]:
    """Returns the exit code of a program, and what it prints."""
    script = directory / "script.py"
    script.write_text(text)
    own = {name: value for name, value in os.environ.items() if name != LAUNCHER_VARIABLE} | variables
    done = subprocess.run([sys.executable, str(script)], env=own, capture_output=True, text=True, timeout=DEADLINE)
    return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        (f"{THREAD}raise ValueError('wrong')", ["ValueError: wrong", "ValueError wrong"]),
        (f"{EXECUTOR}raise ValueError('wrong')", ["ValueError: wrong", "ValueError wrong"]),
        (f"{HANDLER}raise ValueError('wrong')", ["ValueError: wrong", "ValueError wrong"]),
        (f"{HANDLER}{HOOK}raise ValueError('wrong')", ["in the hook", "ValueError wrong"]),
        (f"{HANDLER}sys.excepthook = lambda *error: sys.exit(7)\nraise ValueError('wrong')", ["SystemExit 7"]),
        (f"{THREAD}sys.exit(3)", ["SystemExit 3"]),
        (f"{EXECUTOR}{MAIN.format('return 3')}", ["SystemExit 3"]),
        (f"{HANDLER}{MAIN.format('sys.exit(0)')}", ["SystemExit 0"]),
        (f"{THREAD}sys.exit('a message')", ["a message", "SystemExit a message"]),
        (f"{THREAD}sys.exit()", ["SystemExit None"]),
        (
            f"try:\n    sys.exit(3)\nexcept SystemExit as end:\n    end.code = 4\n    {THREAD}    raise",
            ["SystemExit 4"],
        ),
    ],
)
def test_the_end_of_the_main_thread_is_reported(text: str, last: list[str], tmp_path: pathlib.Path) -> None:
    code, lines = run(BEGINNING + text, tmp_path)
    assert (code, lines[-len(last) :]) == (9, last)


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    sys.exit(3)\nexcept SystemExit as end:\n    assert end.code == 3",
        "thread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()\nthread.join()",
        "pass",
    ],
)
def test_other_ends_are_not(text: str, tmp_path: pathlib.Path) -> None:
    assert run(BEGINNING + text, tmp_path) == (0, [])


def test_a_report_that_fails_leaves_the_exit_code(tmp_path: pathlib.Path) -> None:
    code, lines = run(f"{BEGINNING}exit_status._callbacks[:] = [lambda error: 1 / 0]\nsys.exit(3)", tmp_path)
    assert code == 3 and lines[-1] == "ZeroDivisionError: division by zero"


def test_the_exception_of_sys_exit_is_that_of_python() -> None:
    with pytest.raises(SystemExit) as raised:
        exit_status._wrap_exit(sys.exit)((3, 4))
    assert repr(raised.value) == "SystemExit(3, 4)" and raised.value.code == (3, 4)
    assert type(pickle.loads(pickle.dumps(raised.value))) is SystemExit


ERROR = """
import tfdist.errors

def prepare():
    raise {error}

prepare()
"""


@pytest.mark.parametrize(("error", "code"), [("InputError", 2), ("NotFiniteError", 3), ("Preempted", 75)])
def test_a_process_of_a_launcher_ends_with_one_line_and_the_code(error: str, code: int, tmp_path: pathlib.Path) -> None:
    ended, lines = run(ERROR.format(error=f"tfdist.errors.{error}('It\\nis so.')"), tmp_path, TFDIST_LAUNCHER_ID="1")
    place = f"{tmp_path / 'script.py'}, line 5: " if code == 2 else ""
    assert (ended, lines) == (code, [f"tfdist: {place}It is so."])


def test_other_errors_and_programs_have_the_traceback_of_python(tmp_path: pathlib.Path) -> None:
    for code, lines in (
        run(ERROR.format(error="ValueError('It is so.')"), tmp_path, TFDIST_LAUNCHER_ID="1"),
        run(ERROR.format(error="tfdist.errors.InputError('It is so.')"), tmp_path),
    ):
        assert code == 1 and lines[0].startswith("Traceback") and lines[-1].endswith("Error: It is so.")
