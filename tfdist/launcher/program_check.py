"""Checks the command of a job before anything starts."""

import os
import re
import shlex
import shutil
from collections.abc import Sequence

from tfdist.errors import InputError

_PYTHON = re.compile(r"(python|pypy)[0-9.]*(\.exe)?")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_PROGRAM = re.compile(r"-[a-zA-Z]*[cmhV?].*|--(help.*|version)")  # options that contain a program, or need none


def check_program(name: str, arguments: Sequence[str] = ()) -> None:
    """Checks that a program can be started, before logs are created and other hosts wait for this one.

    Args:
      name: the program.
      arguments: its arguments.

    Raises:
      InputError: it cannot, or it is Python and would read its program from the standard input.
    """
    if shutil.which(name):
        if _PYTHON.fullmatch(os.path.basename(name)) and not _names_program(arguments):
            raise InputError(
                "Python must be given a program, since ranks have no standard input. Received: "
                f"{shlex.join([name, *arguments])}. Write the program into a file: {name} program.py."
            )
        return
    if os.path.isdir(name):
        problem, remedy = "which is a directory", "Give a program"
    elif name.endswith(".py") and os.path.isfile(name):
        problem, remedy = "which is a script, not a program", f"Write python {name}"
    elif os.path.isfile(name):
        problem, remedy = "a file that is not executable, or not on the PATH", f"Write ./{name}, or make it executable"
    else:
        problem, remedy = "which is not on the PATH", "Correct it, or give its path"
    raise InputError(f'The command must be a program that can be started. Received: "{name}", {problem}. {remedy}.')


def _names_program(arguments: Sequence[str]) -> bool:
    """Returns whether Python is given a script, a module, a command, or an option with which it needs none."""
    rest = iter(arguments)
    for each in rest:
        if each in _WITH_VALUE:
            next(rest, None)
        elif not each.startswith("-") or _PROGRAM.fullmatch(each):
            return True
        elif each == "-":
            return False
    return False
