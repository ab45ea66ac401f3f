"""Commands that are refused before a job starts, and those that are not."""

import sys

import pytest

from tfdist.errors import InputError
from tfdist.launch import check_program


@pytest.mark.parametrize(
    "arguments",
    [
        ["program.py"],
        ["-u", "program.py", "-"],
        ["-W", "error", "-X", "dev", "program.py"],
        ["-m", "tfdist.train"],
        ["-um", "tfdist.train"],
        ["-c", "print(1)"],
        ["--version"],
        ["-V"],
    ],
)
def test_python_with_a_program(arguments: list[str]) -> None:
    check_program(sys.executable, arguments)


@pytest.mark.parametrize("arguments", [[], ["-"], ["-u", "-"], ["-u"], ["-W", "error"], ["-", "program.py"]])
def test_python_without_a_program_is_refused(arguments: list[str]) -> None:
    with pytest.raises(
        InputError, match="^Python must be given a program, since ranks have no standard input. Received: "
    ):
        check_program("python", arguments)


def test_other_programs_need_no_arguments() -> None:
    check_program("true")
