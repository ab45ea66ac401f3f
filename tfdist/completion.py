"""Print a script that completes commands, flags and their values by Tab, for bash or zsh.

The script is static: it contains the commands and flags of this version, and starts no processes.
"""

import contextlib
import io
import json
import runpy
import sys
import warnings
from typing import Any

from tfdist.__main__ import commands
from tfdist.cli import command
from tfdist.cli.completion_scripts import SHELLS, Command, Flag
from tfdist.config.fields import NO_EFFECT_HELP
from tfdist.errors import InputError
from tfdist.errors.formatting import nearest


def describe_command(name: str) -> dict[str, Any]:
    """Returns the output of `tfdist NAME --helpjson`, without importing TensorFlow."""
    output, arguments = io.StringIO(), sys.argv[1:]
    sys.argv[1:] = ["--helpjson"]
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module may already be imported under its own name
            runpy.run_module(f"tfdist.{name}", run_name="__main__", alter_sys=True)
    finally:
        sys.argv[1:] = arguments
    description: dict[str, Any] = json.loads(output.getvalue())
    return description


_SHELL_NAMES = " or ".join(SHELLS)


def main(shell: str) -> int:
    """Prints the script for a shell; returns the exit code."""
    if shell not in SHELLS:
        raise InputError(f"The shell must be {_SHELL_NAMES}. Received: {shell}.{nearest(shell, SHELLS)}")
    descriptions = [_describe(name) for name in commands()]
    print(SHELLS[shell](descriptions), end="")
    return 0


def _describe(name: str) -> Command:
    data = describe_command(name)
    effective_flags = [flag for flag in data["flags"] if flag["topic"] != NO_EFFECT_HELP]
    flags = [
        Flag(flag["name"], flag["help"], flag["boolean"], flag["choices"] or flag["known"]) for flag in effective_flags
    ]
    words = data["name"].split()
    return Command(words[0], data["about"], words[1:], data["arguments"], flags)


def _run(values: Any, arguments: list[str]) -> int:
    return main(
        command.only_argument(
            arguments, f"tfdist completion takes one shell: {_SHELL_NAMES}.", "Write tfdist completion bash."
        )
    )


_EXAMPLES = ("source <(tfdist completion bash)", "tfdist completion zsh > ~/.zfunc/_tfdist  # with ~/.zfunc in fpath")

if __name__ == "__main__":
    about = __doc__.partition("\n")[0]
    shells = "|".join(SHELLS)
    sys.exit(command.run("completion", lambda values: None, _run, about=about, arguments=shells, examples=_EXAMPLES))
