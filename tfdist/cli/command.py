"""The shell in which every command runs: flags in, an exit code out, and each error told once.

An error that a user can cause is one line on stderr; anything else keeps its traceback. Nothing here imports
TensorFlow.
"""

import contextlib
import errno
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

from absl import flags as absl_flags

from tfdist.cli import help_text
from tfdist.errors import ExitCode, InputError, TfdistError
from tfdist.errors.engine_errors import one_line, out_of_memory
from tfdist.grammar.spec import did_you_mean
from tfdist.process import signals
from tfdist.process.stack_dumps import main_stack

_GONE = (errno.EPIPE, errno.EIO)  # what the writing to a reader, or a terminal, says that is gone
INTERRUPTED = 130  # a shell's code for the end by Ctrl-C
_HELP = ("help", "helpshort", "helpfull")
_EVERY_COMMAND = {
    "--flagfile": "Read flags from a file, one a line; later flags win.",
    "--help": "Show this help.",
}
_log = logging.getLogger(__name__)


class _HelpWanted(Exception):
    """`--help` was among the flags; those behind it, and unknown ones, do not matter."""


class _HelpFlag(absl_flags.BooleanFlag):
    def parse(self, argument: str | bool) -> None:
        super().parse(argument)
        if self.value:
            raise _HelpWanted


def run(
    name: str,
    define: Callable[[absl_flags.FlagValues], None],
    call: Callable[..., int | None],
    argv: Sequence[str] | None = None,
    *,
    about: str = "",
    arguments: str = "",
    explain: Callable[[BaseException], TfdistError | None] | None = None,
) -> int:
    """Parses a command line, calls the command and says what went wrong.

    Args:
      name: the command's, as in `python -m tfdist.<name>`.
      define: defines the command's flags on the values that it is given.
      call: the command: takes the parsed values, and the arguments behind the flags if `arguments` is given; returns
        an exit code, or None for 0.
      argv: the command line with the program's name; None for this process's.
      about: the help's first sentence.
      arguments: what the command takes behind its flags, for the help; empty if it takes flags only.
      explain: says what an exception means, if it knows. It is asked about every `Exception` that is neither a
        `TfdistError` nor a lack of memory: a broken connection may be a peer that was lost, which only who started
        the peers can tell.

    Returns:
      The exit code, with everything flushed; whoever calls leaves the process with it.
    """
    program = f"tfdist.{name}"
    values = absl_flags.FlagValues()
    values.set_gnu_getopt(False)  # what follows the first argument is the argument's: another command's flags
    try:
        define(values)
        _define_help(values)
        rest = parse(values, list(sys.argv if argv is None else argv), program, arguments)
        with _says_where_it_is():
            return int((call(values, rest) if arguments else call(values)) or ExitCode.DONE)
    except _HelpWanted:
        width = min(shutil.get_terminal_size().columns, 120)
        text = help_text.render(f"python -m {program}", _topics(values), about, arguments, width)
        with contextlib.suppress(BrokenPipeError):  # `| head` has read enough
            print(text)
        return ExitCode.DONE
    except KeyboardInterrupt:
        return _say(program, "Interrupted.", INTERRUPTED)
    except TfdistError as error:
        _log.debug("Where it was found:", exc_info=error)
        return _say(program, str(error), error.exit_code)
    except Exception as error:
        known = out_of_memory(error) or (explain(error) if explain else None)
        if known is None:
            traceback.print_exception(error)
            return ExitCode.FAILED
        _log.debug("What is behind it:", exc_info=error)
        return _say(program, str(known), known.exit_code)
    finally:
        flush()


@contextlib.contextmanager
def _says_where_it_is() -> Iterator[None]:
    """Inside, SIGUSR1 prints where the main thread is, in place of ending the process; a training has more to say."""
    if not signals.can_be_heard():
        yield
        return
    with os.fdopen(os.dup(2), "w") as stream:  # not what a command puts in its place while it imports TensorFlow

        def say(_: int) -> None:
            print("Where this process is (SIGUSR1):", *main_stack(), sep="\n  ", file=stream, flush=True)

        with signals.heard({signal.SIGUSR1: say}):
            yield


def _define_help(values: absl_flags.FlagValues) -> None:
    for name in _HELP:
        flag = _HelpFlag(name, False, "", short_name="h" if name == "help" else None)
        absl_flags.DEFINE_flag(flag, values, "tfdist.cli.command")


def parse(values: absl_flags.FlagValues, argv: list[str], program: str, arguments: str) -> list[str]:
    """Sets the values and returns what stands behind the flags.

    Args:
      values: with the flags defined.
      argv: the program's name, and the command line behind it.
      program: the command's name in messages.
      arguments: what it takes behind its flags; empty if it takes flags only.

    Raises:
      InputError: in one line of our own.
    """
    remedy = f"`python -m {program} --help` lists the flags."
    try:
        rest = values(argv)[1:]
    except absl_flags.UnrecognizedFlagError as error:
        known = [f"--{name}" for name in values if name not in ("h", *_HELP)]
        question = did_you_mean(f"--{error.flagname}", known)
        raise InputError(f"--{error.flagname} is not a flag of {program}.{question} {remedy}") from error
    except absl_flags.CantOpenFlagFileError as error:
        cause = str(error).removeprefix("ERROR:: Unable to open flagfile: ")
        raise InputError(f"--flagfile must name a file that can be read. Received: {cause}.") from error
    except (absl_flags.Error, ValueError) as error:
        raise InputError(f"{str(error).rstrip('.')}. {remedy}") from error
    if rest and not arguments:
        raise InputError(f'Flags alone are taken, written --name=value. Received: "{rest[0]}". {remedy}')
    return rest


def only(arguments: list[str], rule: str, remedy: str) -> str:
    """The argument of a command that takes one behind its flags.

    Args:
      arguments: what stands there.
      rule: begins the message if it is none, or more than one.
      remedy: ends it.

    Raises:
      InputError: so it is.
    """
    if len(arguments) != 1:
        raise InputError(f"{rule} Received: {len(arguments)} arguments. {remedy}")
    return arguments[0]


def _topics(values: absl_flags.FlagValues) -> dict[str, list[tuple[str, str]]]:
    """The flags by topic: a flag's module name, if it begins with a capital as modules do not."""
    topics: dict[str, list[tuple[str, str]]] = {}
    for module, flags in values.flags_by_module_dict().items():
        shown = [_described(flag) for flag in flags if flag.name not in _HELP]
        if shown:
            topics.setdefault(module if module[:1].isupper() else "Flags", []).extend(shown)
    return {**topics, "Every command": list(_EVERY_COMMAND.items())}


def _described(flag: absl_flags.Flag) -> tuple[str, str]:
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    default = "" if flag.default in (None, "", False) else f" (default: {flag.default})"
    return name, f"{flag.help}{default}"


def _say(program: str, message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # the code says it, too
        print(f"{program}: {one_line(message)}", file=sys.stderr)
    return int(code)


def flush(may_lose: bool = False) -> None:
    """Writes out what was printed; what nobody reads any more is dropped.

    Args:
      may_lose: whether what cannot be written is dropped, too, as on a full disk.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if error.errno not in _GONE and not may_lose:
                raise
            # Python's own flush at the end must not complain either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
