"""Errors of tfdist that a program does not catch: how they end it, by itself and in a process of a launcher."""

import os
import pathlib
import subprocess
import sys

import pytest

from tfdist.process.preemption import LAUNCHER_VARIABLE

PROGRAM = """
import tfdist.errors

def prepare():
    raise {error}

prepare()
"""


def run(error: str, directory: pathlib.Path, **variables: str) -> tuple[int, list[str]]:
    """Returns the exit code of a program that raises an error, and the lines that it prints."""
    script = directory / "script.py"
    script.write_text(PROGRAM.format(error=error))
    own = {name: value for name, value in os.environ.items() if name != LAUNCHER_VARIABLE} | variables
    done = subprocess.run([sys.executable, str(script)], env=own, capture_output=True, text=True, timeout=300)
    return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.parametrize(("error", "code"), [("InputError", 2), ("NotFiniteError", 3), ("Preempted", 75)])
def test_a_process_of_a_launcher_ends_with_one_line_and_the_code(error: str, code: int, tmp_path: pathlib.Path) -> None:
    ended, lines = run(f"tfdist.errors.{error}('It\\nis so.')", tmp_path, TFDIST_LAUNCHER_ID="1")
    place = f"{tmp_path / 'script.py'}, line 5: " if code == 2 else ""
    assert (ended, lines) == (code, [f"tfdist: {place}It is so."])


def test_other_errors_and_programs_have_the_traceback_of_python(tmp_path: pathlib.Path) -> None:
    for code, lines in (
        run("ValueError('It is so.')", tmp_path, TFDIST_LAUNCHER_ID="1"),
        run("tfdist.errors.InputError('It is so.')", tmp_path),
    ):
        assert code == 1 and lines[0].startswith("Traceback") and lines[-1].endswith("Error: It is so.")
