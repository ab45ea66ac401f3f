"""An uncaught error is known as soon as the main thread has ended, although other threads and exit handlers do not end.

Errors of tfdist that a program does not catch end it with one line in a process of a launcher.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.waiting import DEADLINE
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

exit_status.on_uncaught_error(end)
"""
THREAD = "threading.Thread(target=stay).start()\n"
EXECUTOR = "concurrent.futures.ThreadPoolExecutor().submit(stay)\n"
HANDLER = "atexit.register(stay)\n"


def run(text: str, directory: pathlib.Path, **variables: str) -> tuple[int, list[str]]:
    """Returns the exit code of a program, and what it prints."""
    script = directory / "script.py"
    script.write_text(text)
    own = {name: value for name, value in os.environ.items() if name != LAUNCHER_VARIABLE} | variables
    done = subprocess.run([sys.executable, str(script)], env=own, capture_output=True, text=True, timeout=DEADLINE)
    return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.parametrize("stays", [THREAD, EXECUTOR, HANDLER])
def test_an_uncaught_error_is_reported(stays: str, tmp_path: pathlib.Path) -> None:
    code, lines = run(f"{BEGINNING}{stays}raise ValueError('wrong')", tmp_path)
    assert (code, lines[-2:]) == (9, ["ValueError: wrong", "ValueError wrong"])


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
