"""Runs a command: parses its flags, returns an exit code, and reports each error once.

Errors that a user can cause are printed as one line on stderr; others go to `sys.excepthook`, which prints a traceback. Does
not import TensorFlow.
"""

import contextlib
import dataclasses
import difflib
import errno
import functools
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from absl import flags as absl_flags

from tfdist.cli import flags, output
from tfdist.cluster import signals
from tfdist.config.fields import NO_EFFECT_HELP
from tfdist.config.job_config import RunConfig
from tfdist.config.train_config import TrainConfig
from tfdist.errors import (
    ExitCode,
    InputError,
    Interrupted,
    TfdistError,
    did_you_mean,
    naming_flags,
    nearest,
    one_line,
    out_of_memory,
)
from tfdist.storage.registry import read_text

# Names of flags in Lightning, Accelerate, DeepSpeed, torchrun, Horovod and Transformers, for messages about unknown flags.
OTHER_NAMES = {
    "accumulate_steps": "gradient_accumulation_steps accumulate_grad_batches backward_passes_per_step",
    "batch_size": "bs global_batch_size train_batch_size",
    "checkpoint_every": "save_steps save_every save_interval",
    "clip_norm": "max_grad_norm grad_clip gradient_clipping gradient_clip_val",
    "communication": "backend dist_backend",
    "data_dir": "data_path dataset_path",
    "decay": "lr_scheduler lr_scheduler_type scheduler",
    "devices": "gpus num_gpus n_gpus",
    "epochs": "max_epochs num_epochs num_train_epochs",
    "eval_every": "eval_steps eval_interval",
    "learning_rate": "lr base_lr init_lr",
    "log_every": "logging_steps log_interval log_every_n_steps",
    "output_dir": "save_dir logdir work_dir default_root_dir",
    "precision": "fp16 bf16 amp half mixed_precision dtype",
    "recompute": "gradient_checkpointing activation_checkpointing remat",
    "resume": "resume_from_checkpoint ckpt_path",
    "seed": "random_seed",
    "shard": "zero zero_stage deepspeed fsdp",
    "steps": "max_steps num_steps train_steps max_train_steps",
    "steps_per_call": "steps_per_execution",
    "strategy": "accelerator distribution_strategy",
    "warmup_steps": "num_warmup_steps",
}
LAUNCHER_NAMES = {
    "hosts": "hostfile host_discovery_script",
    "max_restarts": "reset_limit",
    "node_rank": "machine_rank",
    "nodes": "nnodes num_nodes num_machines",
    "processes": "np nproc num_proc num_processes nproc_per_node world_size",
}
COMMON_FLAGS = "Common flags"  # topic of the flags that all commands have
_CLOSED_ERRORS = (errno.EPIPE, errno.EIO)  # errors of writing to a closed pipe or terminal
INTERRUPTED = 130  # exit code of a shell after Ctrl-C
_CONFIG = "config"
_JSON = "helpjson"  # the help as data, for other programs
_HELP = ("help", "helpshort", "helpfull", _JSON)
FILES = {
    "--flagfile": "Read flags from a file, one per line. Later flags take precedence.",
    f"--{_CONFIG}": "Read flags from a YAML file that maps names to values. The command line and --flagfile take precedence.",
}
_KINDS = {"int": "an integer", "float": "a number, such as 0.001", "bool": "true or false"}  # by absl's names of types
_NULL = ("", "null", "~")  # an empty value, and YAML's spellings of null
HELP_LINE = {"--help": "Show this help."}
_log = logging.getLogger(__name__)


def _flags_by_other_name(names: Mapping[str, str]) -> dict[str, str]:
    return {other: flag for flag, others in names.items() for other in (flag, *others.split())}


_TRAIN_FLAGS, _LAUNCHER_FLAGS = _flags_by_other_name(OTHER_NAMES), _flags_by_other_name(LAUNCHER_NAMES)


def _hint(flag_text: str, known_flags: Mapping[str, Any], program: str) -> str:
    """Returns a sentence that suggests the flag meant by an unknown one, such as "--lr=0.1" or "-np"; "" if there is none."""
    name, _, value = flag_text.lstrip("-").partition("=")
    name = name.replace("-", "_").lower()
    names = [flag for flag in (name, _TRAIN_FLAGS.get(name), _LAUNCHER_FLAGS.get(name)) if flag]
    for flag in names:
        if flag in known_flags:
            keeps_value = value and not known_flags[flag].boolean and flag not in ("precision", "shard")
            return f" Use --{flag}{f'={value}' if keeps_value else ''}."
    if name in _LAUNCHER_FLAGS and "strategy" in known_flags:
        return f" It is a flag of the launcher: `tfdist launch --{names[-1]}={value or 'N'} -- {program} ...`."
    if "processes" in known_flags and names[-1] in TrainConfig.__dataclass_fields__:
        return f" It is a flag of the launched command: pass --{names[-1]} after `--`."
    is_script_argument = program == "tfdist run" and not difflib.get_close_matches(name, known_flags)
    return " Put the script's arguments after its name." if is_script_argument else ""


def _render_help(
    program: str, topics: Mapping[str, Sequence[tuple[str, str]]], about: str, arguments: str, examples: Sequence[str]
) -> str:
    """Returns the help of a command; `topics` has the syntax and the description of flags by title."""
    width = min(shutil.get_terminal_size().columns, 120)
    column = 4 + max(len(name) for lines in topics.values() for name, _ in lines)
    flags_text = "" if [*topics] == [COMMON_FLAGS] else "[--flag=value ...] "
    parts = [f"Usage: {program} {flags_text}{arguments}".rstrip()]
    parts += [textwrap.fill(" ".join(about.split()), width)] if about else []
    wrap = functools.partial(
        textwrap.fill, width=width, subsequent_indent=" " * column, break_long_words=False, break_on_hyphens=False
    )
    for topic, lines in topics.items():
        rows = (wrap(text, initial_indent=f"  {name}".ljust(column)) for name, text in lines)
        parts.append("\n".join([f"{topic}:", *rows]))
    if examples:
        parts.append("\n".join(["Examples:", *(f"  {example}" for example in examples)]))
    return "\n\n".join(parts)


class _HelpRequested(Exception):
    """Raised when `--help` is parsed, so that later and unknown flags are ignored."""


class _HelpFlag(absl_flags.BooleanFlag):
    def parse(self, argument: str | bool) -> None:
        super().parse(argument)
        if self.value:
            raise _HelpRequested(self.name)


def run(
    name: str,
    define: type | Callable[[absl_flags.FlagValues], None] | None,
    call: Callable[..., int | None],
    argv: Sequence[str] | Callable[[], Sequence[str]] | None = None,
    *,
    about: str = "",
    arguments: str = "",
    has_json: bool = False,
    examples: Sequence[str] = (),
) -> int:
    """Parses a command line, calls the command and reports errors.

    Args:
      name: name of the command, as in `tfdist <name>`.
      define: a configuration class, whose fields become the command's flags; or a function that defines flags in the
        `FlagValues` passed to it; None if the command has no flags.
      call: runs the command and returns an exit code, or None for 0. It takes, in this order, the list of arguments after the
        flags if `arguments` is not empty (for "RUN", the single argument); the configuration or the parsed `FlagValues` if
        `define` is not None; and an `Output` if `has_json`.
      argv: command line, including the program name, or a function that returns it and may raise `InputError`; None for the
        command line of this process.
      about: first sentence of the help.
      arguments: arguments after the flags, for the help; empty if the command takes only flags.
      has_json: whether the command has the flag `--json`.
      examples: commands to show at the end of the help.

    Returns:
      The exit code, after flushing all output; the caller exits the process with it.
    """
    program = f"tfdist {name}"
    values = absl_flags.FlagValues()
    # Flags after the first argument may belong to another command, unless it is a directory.
    values.set_gnu_getopt(arguments.startswith(("RUN", "DIR")))
    try:
        if isinstance(define, type):
            flags.define(values, define)
        elif define:
            define(values)
        if has_json:
            json_help = "Print only the result, as one JSON object, to standard output (docs/reference/json.md)."
            absl_flags.DEFINE_boolean("json", False, json_help, flag_values=values, module_name="Result")
        for flag in _HELP:
            help_flag = _HelpFlag(flag, False, "", short_name="h" if flag == "help" else None)
            absl_flags.DEFINE_flag(help_flag, values, __name__)
        command_line = argv() if callable(argv) else sys.argv if argv is None else argv
        remaining_arguments = parse(values, list(command_line), program, arguments)
        with _stack_on_sigusr1(), naming_flags(), contextlib.ExitStack() as stack:
            call_arguments: list[Any] = [remaining_arguments] if arguments else []
            if arguments == "RUN" and len(remaining_arguments) != 1:
                raise InputError(
                    f"{program} takes one directory. Received: {len(remaining_arguments)} arguments. Pass the directory of a "
                    "run."
                )
            if arguments == "RUN":
                call_arguments = remaining_arguments
            if define:
                call_arguments.append(flags.config(values, define) if isinstance(define, type) else values)
            if has_json:
                call_arguments.append(
                    stack.enter_context(output.open_output(name.partition(" ")[0], bool(values["json"].value)))
                )
            return int(call(*call_arguments) or ExitCode.DONE)
    except _HelpRequested as request:
        if str(request) == _JSON:
            description = {"name": name, "about": about, "arguments": arguments, "examples": list(examples)}
            text = json.dumps({**description, "flags": [_flag_data(flag) for flag in _command_flags(values)]})
        else:
            text = _render_help(program, _topics(values), about, arguments, examples)
        with contextlib.suppress(BrokenPipeError):  # `| head` has read enough
            print(text)
        return ExitCode.DONE
    except KeyboardInterrupt:
        return _report(program, "Interrupted.", INTERRUPTED)
    except TfdistError as error:
        _log.debug("Traceback of the error:", exc_info=error)
        code = INTERRUPTED if isinstance(error, Interrupted) else error.exit_code
        return _report(program, str(error), code)
    except Exception as error:
        if memory_error := out_of_memory(error):
            _log.debug("Traceback of the cause:", exc_info=error)
            return _report(program, str(memory_error), memory_error.exit_code)
        uncaught = error
    finally:
        flush()
    return _fail(uncaught)  # outside of the handler, to not become the context of an error in the hook


def _fail(error: Exception) -> int:
    """Reports an error as Python does before it ends a process; the hook may raise `SystemExit`."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        flush()
    return ExitCode.FAILED


@contextlib.contextmanager
def _stack_on_sigusr1() -> Iterator[None]:
    """Prints the main thread's stack on SIGUSR1 instead of exiting; training installs a more detailed handler."""
    if not signals.can_set_handlers():
        yield
        return
    # A copy of stderr, because the command may redirect it while importing TensorFlow.
    with os.fdopen(os.dup(2), "w") as stream:

        def print_stack(_: int) -> None:
            print("Stack of this process (SIGUSR1):", *signals.main_stack(), sep="\n  ", file=stream, flush=True)

        with signals.handle_signals({signal.SIGUSR1: print_stack}):
            yield


def parse(values: absl_flags.FlagValues, argv: list[str], program: str, arguments: str) -> list[str]:
    """Parses a command line, which includes the program name, and returns the arguments after the flags.

    `values` has all flags defined, and `arguments` is empty if the command takes only flags.

    Raises:
      InputError: the command line, or a file that it names, is invalid; the message is one line.
    """
    remedy = f"`{program} --help` lists the flags."
    absl_flags.DEFINE_multi_string(_CONFIG, [], "", flag_values=values, module_name=__name__)
    try:
        remaining_arguments = values(argv)[1:]
    except absl_flags.UnrecognizedFlagError as error:
        raise InputError(_unknown_flag(values, error.flagvalue, program)) from error
    except absl_flags.CantOpenFlagFileError as error:
        cause = re.sub(r".*flagfile: (?:\[Errno \d+\] )?(.*): '(.*)'", r"\2 (\1)", str(error))
        raise InputError(f"--flagfile must name a readable file. Received: {cause}.") from error
    except (absl_flags.Error, ValueError) as error:
        raise InputError(f"{_invalid_value(values, error)} {remedy}") from error
    if remaining_arguments and not arguments:
        remedy = f"Pass a YAML file with --{_CONFIG}=FILE." if re.match(r"\w+: ", remaining_arguments[0]) else remedy
        raise InputError(
            f'Only flags are accepted, written --name=value. Received: "{remaining_arguments[0]}". {remedy}'
        )
    for path in reversed(values[_CONFIG].value or []):  # the last one wins
        _read_config(values, path, program)
    return remaining_arguments


def _invalid_value(values: absl_flags.FlagValues, error: Exception) -> str:
    """Returns a sentence about an invalid value, because absl only reports Python's message."""
    match = re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)
    kind = _KINDS.get(values[match[1]].flag_type()) if match and match[1] in values else None
    return f"--{match[1]} must be {kind}. Received: {match[2]}." if match and kind else f"{str(error).rstrip('.')}."


def _unknown_flag(values: absl_flags.FlagValues, flag_text: str, program: str) -> str:
    known_flags = {name: values[name] for name in values if name not in ("h", *_HELP)}
    name = flag_text.partition("=")[0]
    remedy = _hint(flag_text, known_flags, program)
    if not remedy:
        similar = did_you_mean(name.lstrip("-"), known_flags, form="--{}")
        remedy = f"{similar} `{program} --help` lists the flags."
    return f"{name} is not a flag of {program}.{remedy}"


def _read_config(values: absl_flags.FlagValues, path: str, program: str) -> None:
    """Sets the flags of a configuration file that are not set yet; a flag whose value is empty or null is left unset."""
    for name, value in _read_yaml(path).items():
        text = _text(value)
        if name not in values or name in ("h", _CONFIG, *_HELP):
            raise InputError(f"{path}: {_unknown_flag(values, f'--{name}={text}', program).removeprefix('--')}")
        flag = values[name]
        if flag.present or text in _NULL:
            continue
        try:
            flag.parse(str(yaml.SafeLoader.bool_values.get(text.lower(), text)) if flag.boolean else text)
        except absl_flags.Error as error:
            raise InputError(f"{path}: {_invalid_value(values, error)}") from error


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        values = yaml.load(read_text(path), yaml.BaseLoader) or {}  # numbers stay as they are written
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        cause = getattr(error, "problem", None) or getattr(error, "strerror", None) or one_line(str(error)).rstrip(".")
        raise InputError(f"--config must name a YAML file. Received: {path} ({cause}).") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InputError(
            "--config must name a file that maps names of flags to values, one per line, such as batch_size: 64. "
            f"Received: {path}. For flags as on a command line, use --flagfile."
        )
    return values


def _text(value: Any) -> str:
    """Returns a value as on a command line: list items are joined by commas, and the entries of a mapping by semicolons."""
    if isinstance(value, list):
        return ",".join(map(_text, value))
    if isinstance(value, dict):
        return "; ".join(f"{_text(key)}: {_text(item)}" for key, item in value.items())
    return str(value)


def _topics(values: absl_flags.FlagValues) -> dict[str, list[tuple[str, str]]]:
    topics: dict[str, list[tuple[str, str]]] = {}
    for topic, flag in _command_flags(values):
        topics.setdefault(topic, []).append(_syntax_and_help(flag))
    files = FILES if topics else {}
    if ignored_flags := topics.pop(NO_EFFECT_HELP, []):
        topics[NO_EFFECT_HELP] = [
            ("", ", ".join(f"--{name.removeprefix('--').removeprefix('[no]')}" for name, _ in ignored_flags))
        ]
    return {**topics, COMMON_FLAGS: [*files.items(), *HELP_LINE.items()]}


def _command_flags(values: absl_flags.FlagValues) -> Iterator[tuple[str, absl_flags.Flag]]:
    """Yields topics and flags, in the order of the help.

    The topic is the module name of a flag if it is capitalized, unlike real module names.
    """
    for module, module_flags in values.flags_by_module_dict().items():
        for flag in module_flags:
            if flag.name not in (_CONFIG, *_HELP):
                yield module if module[:1].isupper() else "Flags", flag


def _flag_data(topic_and_flag: tuple[str, absl_flags.Flag]) -> dict[str, Any]:
    topic, flag = topic_and_flag
    return {
        "name": flag.name,
        "topic": topic,
        "help": flag.help,
        "default": flag.default,
        "type": flag.flag_type(),
        "boolean": bool(flag.boolean),
        "choices": list(getattr(flag.parser, "choices", ())),
    }


def _syntax_and_help(flag: absl_flags.Flag) -> tuple[str, str]:
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    default = "" if flag.default in (None, "", False) else f" (default: {flag.default})"
    return name, f"{flag.help}{default}"


def _report(program: str, message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # the exit code also reports the error
        print(f"{program}: {one_line(message)}", file=sys.stderr)
    return int(code)


def flush(ignore_errors: bool = False) -> None:
    """Flushes stdout and stderr; output without a reader is discarded.

    Args:
      ignore_errors: whether to also discard output that cannot be written for another reason, such as a full disk.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None or getattr(stream, "closed", False):  # a program may have replaced it
            continue
        try:
            stream.flush()
        except OSError as error:
            if error.errno not in _CLOSED_ERRORS and not ignore_errors:
                raise
            # Prevents an error from Python's own flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# Flags of tfdist in the environment, for programs that do not define them

FLAGS_VARIABLE = "TFDIST_FLAGS"


def environment_options(overrides: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration from TFDIST_FLAGS and keyword arguments, which take precedence.

    Raises:
      InputError: either is invalid.
    """
    values = absl_flags.FlagValues()
    flags.define(values, RunConfig)
    parse(values, [FLAGS_VARIABLE, *environment_flags()], "tfdist run", "")
    config = flags.config(values, RunConfig)
    names = [field.name for field in dataclasses.fields(RunConfig)]
    for name in overrides:
        if name not in names:
            raise InputError(f"tfdist.distribute has no option {name}.{nearest(name, names)}")
    return dataclasses.replace(config, **overrides)


def environment_flags() -> list[str]:
    """Returns the flags in TFDIST_FLAGS, split as by a shell.

    Raises:
      InputError: a quote is not closed, or the text does not start with a flag.
    """
    text = os.environ.get(FLAGS_VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"{FLAGS_VARIABLE} must be written as in a shell. Received: {text!r}: {error}.") from error
    if words and not words[0].startswith("-"):
        rule = f"{FLAGS_VARIABLE} must contain flags, written --name=value"
        raise InputError(f"{rule}. Received: {text!r}. Write --{words[0]}.")
    return words
