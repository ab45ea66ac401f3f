"""Checks the command of a job before anything starts."""

import os
import shutil

from tfdist.errors import InputError


def check_program(name: str) -> None:
    """Checks that a program can be started, before there are logs and before other hosts wait for this one.

    Raises:
      InputError: it cannot.
    """
    if shutil.which(name):
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
