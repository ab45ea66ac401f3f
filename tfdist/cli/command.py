"""Runs a command: parses its flags, returns an exit code, and reports each error once.

An error that a user can cause is printed as one line on stderr; others go to `sys.excepthook`, which prints their traceback.
Does not import TensorFlow.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

from tfdist.cli import flag_aliases, help_text, output
from tfdist.config.topics import WITHOUT_EFFECT
from tfdist.errors import ExitCode, InputError, Interrupted, TfdistError, naming_flags
from tfdist.errors.engine_errors import one_line, out_of_memory
from tfdist.grammar.spec import did_you_mean
from tfdist.process import signals
from tfdist.process.stack_dumps import main_stack
from tfdist.process.uncaught_errors import call_excepthook

_GONE = (errno.EPIPE, errno.EIO)  # errors of writing to a pipe or terminal that is closed
INTERRUPTED = 130  # exit code of a shell after Ctrl-C
_CONFIG = "config"
_JSON = "helpjson"  # the same as data, for completion and other programs
_HELP = ("help", "helpshort", "helpfull", _JSON)
FILES = {
    "--flagfile": "Read flags from a file, one per line; later flags win.",
    f"--{_CONFIG}": "Read flags from a YAML file that maps their names to values; the command line and --flagfile win.",
}
_KINDS = {"int": "an integer", "float": "a number, such as 0.001", "bool": "true or false"}  # by absl's names of types
HELP_LINE = {"--help": "Show this help."}
_log = logging.getLogger(__name__)


class _HelpWanted(Exception):
    """Raised when `--help` is parsed; later and unknown flags are ignored."""


class _FlagValues(absl_flags.FlagValues):
    """Flags that refuse a flag file which includes itself; absl warns, and ignores the inner one."""

    def _get_flag_file_lines(self, filename: str, parsed_file_stack: list[str] | None = None) -> list[str]:
        if filename in (parsed_file_stack or []):
            raise absl_flags.CantOpenFlagFileError(f"flagfile: it includes itself: '{filename}'")
        return list(super()._get_flag_file_lines(filename, parsed_file_stack))


class _HelpFlag(absl_flags.BooleanFlag):
    def parse(self, argument: str | bool) -> None:
        super().parse(argument)
        if self.value:
            raise _HelpWanted(self.name)


def run(
    name: str,
    define: Callable[[absl_flags.FlagValues], None],
    call: Callable[..., int | None],
    argv: Sequence[str] | Callable[[], Sequence[str]] | None = None,
    *,
    about: str = "",
    arguments: str = "",
    has_json: bool = False,
    examples: Sequence[str] = (),
    explain: Callable[[BaseException], TfdistError | None] | None = None,
) -> int:
    """Parses a command line, calls the command and reports errors.

    Args:
      name: name of the command, as in `tfdist <name>`.
      define: defines the command's flags on the given values.
      call: the command: takes the parsed values; if `arguments` is given, the arguments after the flags; and if `has_json`,
        an `Output`. Returns an exit code, or None for 0.
      argv: command line, including the program name, or what returns it and may raise `InputError`; None for that of this
        process.
      about: first sentence of the help.
      arguments: what the command takes after its flags, for the help; empty if it takes flags only.
      has_json: whether it has the flag `--json`.
      examples: commands to show at the end of the help.
      explain: returns the meaning of an exception if it knows it. Called for every `Exception` except `TfdistError` and
        out-of-memory errors: for example, only the code that started the peers can tell that a broken connection is a
        lost peer.

    Returns:
      The exit code, after flushing all output; the caller exits the process with it.
    """
    program = f"tfdist {name}"
    places: dict[str, str] = {}
    values = _FlagValues()
    values.set_gnu_getopt(False)  # the first argument may be another command, whose flags follow it
    try:
        define(values)
        if has_json:
            define_json(values)
        _define_help(values)
        line = argv() if callable(argv) else argv
        rest = parse(values, list(sys.argv if line is None else line), program, arguments, places)
        with _stack_on_sigusr1(), naming_flags(), contextlib.ExitStack() as stack:
            given: list[Any] = [values]
            if arguments:
                given.append(rest)
            if has_json:
                given.append(stack.enter_context(output.opened(name.partition(" ")[0], bool(values["json"].value))))
            return int(call(*given) or ExitCode.DONE)
    except _HelpWanted as wanted:
        if str(wanted) == _JSON:
            described = {"name": name, "about": about, "arguments": arguments, "examples": list(examples)}
            text = json.dumps({**described, "flags": [_as_data(flag) for flag in _own_flags(values)]})
        else:
            width = min(shutil.get_terminal_size().columns, 120)
            text = help_text.render(program, _topics(values), about, arguments, width, examples)
        with contextlib.suppress(BrokenPipeError):  # `| head` has read enough
            print(text)
        return ExitCode.DONE
    except KeyboardInterrupt:
        return _say(program, "Interrupted.", INTERRUPTED)
    except TfdistError as error:
        _log.debug("Traceback of the error:", exc_info=error)
        code = INTERRUPTED if isinstance(error, Interrupted) else error.exit_code
        return _say(program, _located(str(error), places), code)
    except Exception as error:
        known = out_of_memory(error) or (explain(error) if explain else None)
        if known is not None:
            _log.debug("Traceback of the cause:", exc_info=error)
            return _say(program, str(known), known.exit_code)
        uncaught = error
    finally:
        flush()
    return _fail(uncaught)  # not while it is handled: it is no context of another error in the hook


def _fail(error: Exception) -> int:
    try:
        call_excepthook(error)
    finally:
        flush()
    return ExitCode.FAILED


@contextlib.contextmanager
def _stack_on_sigusr1() -> Iterator[None]:
    """Prints the main thread's location on SIGUSR1 instead of exiting; training installs a more detailed handler."""
    if not signals.can_set_handlers():
        yield
        return
    # A duplicate, because the command may redirect stderr while importing TensorFlow.
    with os.fdopen(os.dup(2), "w") as stream:

        def say(_: int) -> None:
            print("Stack of this process (SIGUSR1):", *main_stack(), sep="\n  ", file=stream, flush=True)

        with signals.handling({signal.SIGUSR1: say}):
            yield


def define_json(values: absl_flags.FlagValues) -> None:
    """Defines `--json`."""
    about = "Print the result as one JSON object, and nothing else, on standard output (docs/reference/json.md)."
    absl_flags.DEFINE_boolean("json", False, about, flag_values=values, module_name="Result")


def _define_help(values: absl_flags.FlagValues) -> None:
    for name in _HELP:
        flag = _HelpFlag(name, False, "", short_name="h" if name == "help" else None)
        absl_flags.DEFINE_flag(flag, values, __name__)


def parse(
    values: absl_flags.FlagValues,
    argv: list[str],
    program: str,
    arguments: str,
    places: dict[str, str] | None = None,
) -> list[str]:
    """Parses the values and returns the arguments after the flags.

    Args:
      values: flag values with all flags defined.
      argv: command line, including the program name.
      program: name of the command in messages.
      arguments: what it takes after its flags; empty if it takes flags only.
      places: filled with file and line of the flags that are read from `--config`.

    Raises:
      InputError: the command line, or a file that it names, is invalid; the message is one line.
    """
    remedy = f"`{program} --help` lists the flags."
    absl_flags.DEFINE_multi_string(_CONFIG, [], "", flag_values=values, module_name=__name__)
    try:
        rest = values(argv)[1:]
    except absl_flags.UnrecognizedFlagError as error:
        raise InputError(_unknown(values, error.flagvalue, program)) from error
    except absl_flags.CantOpenFlagFileError as error:
        cause = re.sub(r".*flagfile: (?:\[Errno \d+\] )?(.*): '(.*)'", r"\2 (\1)", str(error))
        raise InputError(f"--flagfile must name a readable file. Received: {cause}.") from error
    except (absl_flags.Error, ValueError) as error:
        raise InputError(f"{_illegal(values, error)} {remedy}") from error
    if rest and not arguments:
        remedy = f"A YAML file is for --{_CONFIG}." if re.match(r"\w+: ", rest[0]) else remedy
        raise InputError(f'Only flags are accepted, written --name=value. Received: "{rest[0]}". {remedy}')
    for path in reversed(values[_CONFIG].value or []):  # the last one wins
        _read_config(values, path, program, {} if places is None else places)
    return rest


def _illegal(values: absl_flags.FlagValues, error: Exception) -> str:
    """Returns what is wrong with the value of a flag, as a sentence; absl's own texts are Python's."""
    found = re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)
    kind = _KINDS.get(values[found[1]].flag_type()) if found and found[1] in values else None
    return f"--{found[1]} must be {kind}. Received: {found[2]}." if found and kind else f"{str(error).rstrip('.')}."


def _unknown(values: absl_flags.FlagValues, written: str, program: str) -> str:
    """Returns a message about an unknown flag, as it was written, with the one that may be meant."""
    known = {name: values[name] for name in values if name not in ("h", *_HELP)}
    name = written.partition("=")[0]
    remedy = flag_aliases.hint(written, known, program)
    if not remedy:
        similar = did_you_mean(name.lstrip("-"), known, form="--{}")
        remedy = f"{similar} `{program} --help` lists the flags."
    return f"{name} is not a flag of {program}.{remedy}"


def _read_config(values: absl_flags.FlagValues, path: str, program: str, places: dict[str, str]) -> None:
    """Sets the flags of a configuration file that are not set yet."""
    from tfdist.cli import config_file

    for entry in config_file.read(path):
        if entry.name not in values or entry.name in ("h", _CONFIG, *_HELP):
            problem = _unknown(values, f"--{entry.name}={entry.text}", program)
            raise InputError(f"{entry.place}: {problem.removeprefix('--')}")
        flag = values[entry.name]
        if entry.kind not in (str, getattr(flag.parser, "structure", str)):
            raise InputError(
                f"{entry.place}: {entry.name} must be {config_file.KINDS[str]}. Received: {config_file.KINDS[entry.kind]}."
            )
        if flag.present:
            continue
        try:
            flag.parse(entry.boolean if flag.boolean and entry.boolean else entry.text)
        except absl_flags.Error as error:
            raise InputError(f"{entry.place}: {_illegal(values, error)}") from error
        places[entry.name] = entry.place


def _located(message: str, places: Mapping[str, str]) -> str:
    """Adds to a message where the first flag that it names comes from, if that is a configuration file."""
    found = [name for name in re.findall(r"--(\w+)", message) if name in places]
    return f"{message.rstrip('.')}. --{found[0]} is from {places[found[0]]}." if found else message


def only(arguments: list[str], rule: str, remedy: str) -> str:
    """Returns the only argument of a command that takes one after its flags.

    Args:
      arguments: arguments after the flags.
      rule: start of the error message.
      remedy: end of the error message.

    Raises:
      InputError: there is not exactly one argument.
    """
    if len(arguments) != 1:
        raise InputError(f"{rule} Received: {len(arguments)} arguments. {remedy}")
    return arguments[0]


def _topics(values: absl_flags.FlagValues) -> dict[str, list[tuple[str, str]]]:
    """Returns syntax and description of the flags by topic."""
    topics: dict[str, list[tuple[str, str]]] = {}
    for topic, flag in _own_flags(values):
        topics.setdefault(topic, []).append(_described(flag))
    files = FILES if topics else {}
    if idle := topics.pop(WITHOUT_EFFECT, []):
        topics[WITHOUT_EFFECT] = [
            ("", ", ".join(f"--{name.removeprefix('--').removeprefix('[no]')}" for name, _ in idle))
        ]
    return {**topics, help_text.EVERY_COMMAND: [*files.items(), *HELP_LINE.items()]}


def _own_flags(values: absl_flags.FlagValues) -> Iterator[tuple[str, absl_flags.Flag]]:
    """Yields topic and flag, in the order of the help.

    The topic is the module name of a flag, if it is capitalized, which names of modules are not.
    """
    for module, flags in values.flags_by_module_dict().items():
        for flag in flags:
            if flag.name not in (_CONFIG, *_HELP):
                yield module if module[:1].isupper() else "Flags", flag


def _as_data(topic_and_flag: tuple[str, absl_flags.Flag]) -> dict[str, Any]:
    topic, flag = topic_and_flag
    return {
        "name": flag.name,
        "topic": topic,
        "help": flag.help,
        "default": flag.default,
        "type": flag.flag_type(),
        "boolean": bool(flag.boolean),
        "choices": list(getattr(flag.parser, "choices", ())),
        "known": list(getattr(flag.parser, "known", ())),
    }


def _described(flag: absl_flags.Flag) -> tuple[str, str]:
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    default = "" if flag.default in (None, "", False) else f" (default: {flag.default})"
    return name, f"{flag.help}{default}"


def _say(program: str, message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # the exit code also reports the error
        print(f"{program}: {one_line(message)}", file=sys.stderr)
    return int(code)


def flush(may_lose: bool = False) -> None:
    """Flushes stdout and stderr; output without a reader is dropped.

    Args:
      may_lose: whether output that cannot be written for another reason, such as a full disk, is dropped as well.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None or getattr(stream, "closed", False):  # a program may have replaced it
            continue
        try:
            stream.flush()
        except OSError as error:
            if error.errno not in _GONE and not may_lose:
                raise
            # Prevents an error from Python's own flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
