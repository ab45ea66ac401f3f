"""Runs a command, `tfdist train ...` or `python -m tfdist train ...`, or lists the commands."""

import importlib.metadata
import os
import pathlib
import platform
import runpy
import sys
from collections.abc import Iterable, Sequence

import tfdist
from tfdist.errors import ExitCode, did_you_mean

_FOLDER = pathlib.Path(__file__).parent
_PACKAGES = {"TensorFlow": "tensorflow", "Keras": "keras", "Horovod": "horovod"}
_USAGE = "Usage: tfdist COMMAND [--flag=value ...]"
_MORE = (
    "`tfdist help COMMAND` describes a command and its flags. `tfdist --version` prints the versions of tfdist, TensorFlow, "
    "Keras\nand Horovod. `tfdist COMMAND` and `python -m tfdist.COMMAND` are equivalent."
)
_MAIN_GUARD = '\nif __name__ == "__main__":\n'
_HELP, _VERSION = ("help", "--help", "-h"), "--version"


def commands() -> dict[str, str]:
    """Returns the first docstring line of each command, by name. Commands are modules in this directory with a main guard.

    Reads the modules as text, because importing them takes longer.
    """
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("[a-z]*.py"))}
    return {name: text.partition("\n")[0].strip('"') for name, text in texts.items() if _MAIN_GUARD in text}


def main(arguments: Sequence[str]) -> int:
    """Runs a command, which ends by raising `SystemExit`, or prints the commands or the versions and returns the exit code."""
    name, *remaining_arguments = arguments or ["help"]
    if name in _HELP and remaining_arguments and not remaining_arguments[0].startswith("-"):
        name, *remaining_arguments = remaining_arguments[0], "--help", *remaining_arguments[1:]
    if name in _HELP:
        return _print(_command_list())
    if name == _VERSION:
        return _print(_versions())
    if name not in (known_commands := commands()):
        return _unknown_command(name, known_commands)
    sys.argv[1:] = remaining_arguments
    if sys.path and not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as with `python -m`
    runpy.run_module(f"tfdist.{name}", run_name="__main__", alter_sys=True)
    return ExitCode.DONE


def start() -> int:
    """Entry point of the executable `tfdist`; returns the exit code."""
    return main(sys.argv[1:])


def _command_list() -> Iterable[str]:
    summaries = commands()
    width = max(map(len, summaries))
    return [_USAGE, "", *(f"  {name:{width}}  {summary}" for name, summary in summaries.items()), "", _MORE]


def _versions() -> Iterable[str]:
    yield f"tfdist {tfdist.__version__}"
    yield f"Python {platform.python_version()}"
    for title, name in _PACKAGES.items():
        try:
            yield f"{title} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{title} is not installed"


def _unknown_command(name: str, known_commands: Iterable[str]) -> int:
    rule = "The command comes first" if name.startswith("-") else f"{name} is not a command of tfdist"
    question = did_you_mean(name, known_commands)
    received_text = f" Received: {name}." if name.startswith("-") else ""
    print(f"tfdist: {rule}.{received_text}{question} `tfdist` lists the commands.", file=sys.stderr)
    return ExitCode.BAD_INPUT


def _print(lines: Iterable[str]) -> int:
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(start())
