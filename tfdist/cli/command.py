"""Runs a command: parses its flags, returns an exit code, and reports each error once.

Errors that a user can cause are printed as one line on stderr; others go to `sys.excepthook`, which prints a traceback. Does
not import TensorFlow.
"""

import contextlib
import difflib
import errno
import json
import logging
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from absl import flags as absl_flags

from tfdist.cli import output
from tfdist.cluster import signals
from tfdist.cluster.exit_status import call_excepthook
from tfdist.config.fields import NO_EFFECT_HELP
from tfdist.config.train_config import TrainConfig
from tfdist.errors import ExitCode, InputError, Interrupted, TfdistError, naming_flags
from tfdist.errors.engine_errors import one_line, out_of_memory
from tfdist.errors.formatting import did_you_mean
from tfdist.storage.registry import text_of

KINDS: dict[type, str] = {str: "a single value", list: "a list", dict: "a mapping"}
_NULL, _BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"


class Entry(NamedTuple):
    """A flag in a configuration file.

    Attributes:
      name: its name.
      text: its value, as on a command line.
      kind: form of the value: a key of `KINDS`.
      boolean: "true" or "false" if the value is a boolean in YAML, else None.
      location: file and line, for messages.
    """

    name: str
    text: str
    kind: type
    boolean: str | None
    location: str


def read(path: str) -> list[Entry]:
    """Returns the flags in a configuration file, in order.

    Raises:
      InputError: the file cannot be read, is not YAML, or is not a mapping of names to values.
    """
    try:
        root = yaml.compose(text_of(path), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise InputError(f"--config must name a readable text file. Received: {path} ({cause}).") from error
    except RecursionError as error:
        raise InputError(f"--config must name a YAML file without deep nesting. Received: {path}.") from error
    except yaml.YAMLError as error:
        raise InputError(f"{_location(path, error)}: {_problem(error)}. --config must name a YAML file.") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise InputError(
            "--config must name a file that maps names of flags to values, one per line, such as batch_size: 64. "
            f"Received: {path}. For flags as on a command line, use --flagfile."
        )
    return list(_entries(path, root))


def _entries(path: str, root: yaml.MappingNode) -> Iterator[Entry]:
    names: set[str] = set()
    for key, value in root.value:
        location = f"{path}, line {key.start_mark.line + 1}"
        name = _scalar(location, key)
        if name in names:
            raise InputError(f"{location}: {name} is given twice.")
        names.add(name)
        yield Entry(name, *_value(f"{location}: {name}", value), location)


def _value(location: str, node: yaml.Node) -> tuple[str, type, str | None]:
    """Returns the text, the kind and the boolean of an `Entry`."""
    if isinstance(node, yaml.SequenceNode):
        return ",".join(_scalar(location, item) for item in node.value), list, None
    if isinstance(node, yaml.MappingNode):
        pairs = [f"{_scalar(location, key)}: {_scalar(location, item)}" for key, item in node.value]
        return "; ".join(pairs), dict, None
    text = _scalar(location, node)
    # `!!bool` may precede any text.
    boolean = yaml.SafeLoader.bool_values.get(text.lower()) if node.tag == _BOOL else None
    return text, str, None if boolean is None else str(boolean).lower()


def _scalar(location: str, node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise InputError(
            f"{location} must be a string, or a list or mapping of strings. Received: a nested list or mapping."
        )
    if node.tag == _NULL:
        raise InputError(f"{location} has no value. Write one, or leave it out.")
    return str(node.value)


def _location(path: str, error: yaml.YAMLError) -> str:
    mark: Any = getattr(error, "problem_mark", None)
    return f"{path}, line {mark.line + 1}" if mark else path


def _problem(error: yaml.YAMLError) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split()).rstrip(".")


# Names of flags in Lightning, Accelerate, DeepSpeed, torchrun, Horovod, Transformers, Megatron and Keras. They are not
# accepted, but used in messages about unknown flags.

ALIASES = {  # other names of our flags
    "accumulate_steps": "gradient_accumulation_steps grad_accumulation_steps accumulate_grad_batches accumulation_steps "
    "accum_steps grad_accum grad_accum_steps accum_iter backward_passes_per_step update_freq",
    "batch_size": "bs b batch global_batch_size train_batch_size",
    "bucket_mb": "bucket_cap_mb fusion_threshold_mb",
    "checkpoint_every": "save_steps save_every save_interval save_freq checkpoint_interval checkpoint_freq ckpt_every "
    "checkpointing_steps",
    "clip_norm": "grad_clip gradient_clip gradient_clipping gradient_clip_val max_grad_norm clip_grad clip_grad_norm "
    "clip_gradients clipnorm global_clipnorm",
    "clip_value": "clipvalue",
    "communication": "backend dist_backend ddp_backend",
    "config": "config_file config_path cfg deepspeed_config",
    "coordinator": "master_addr main_process_ip rdzv_endpoint dist_url",
    "data_dir": "data_path dataset_path dataset_dir data_root",
    "dataset": "data dataset_name",
    "decay": "schedule learning_rate_schedule learning_rate_scheduler scheduler lr_scheduler lr_scheduler_type lr_schedule "
    "lr_decay lr_decay_style",
    "devices": "gpus num_gpus n_gpus n_gpu ngpus num_devices n_devices num_replicas gpus_per_node",
    "epochs": "max_epochs num_epochs n_epochs num_train_epochs train_epochs epoch",
    "eval_every": "eval_steps eval_interval eval_freq val_every val_check_interval validation_steps",
    "keep": "save_total_limit max_to_keep keep_last checkpoints_total_limit",
    "learning_rate": "lr base_lr init_lr initial_lr peak_lr max_lr",
    "log_every": "logging_steps log_interval log_steps log_freq log_every_n_steps print_freq",
    "loss": "criterion loss_fn",
    "mesh_shape": "mesh device_mesh",
    "model": "arch model_name model_type model_name_or_path",
    "optimizer": "opt optim",
    "output_dir": "save_dir log_dir logdir checkpoint_dir ckpt_dir work_dir model_dir default_root_dir outdir out_dir "
    "out run_dir",
    "precision": "dtype mixed_precision torch_dtype",
    "recompute": "gradient_checkpointing activation_checkpointing recompute_activations remat",
    "resume": "resume_from_checkpoint ckpt_path checkpoint ckpt load_checkpoint restore load resume_from",
    "seed": "random_seed rng_seed seed_everything manual_seed",
    "shard": "zero zero_stage deepspeed fsdp sharded_ddp use_distributed_optimizer",
    "start_timeout_seconds": "start_timeout rdzv_timeout",
    "steps": "max_steps num_steps n_steps train_steps num_train_steps max_train_steps train_iters max_iters iterations iters",
    "steps_per_call": "steps_per_execution steps_per_loop",
    "strategy": "distribution_strategy distribute_strategy distributed_type",
    "warmup_steps": "num_warmup_steps lr_warmup_steps lr_warmup_iters warmup warmup_iters",
}
LAUNCHER_ALIASES = {  # other names of flags of `tfdist launch`
    "elastic_timeout_seconds": "elastic_timeout",
    "hosts": "hostfile host_discovery_script",
    "max_restarts": "reset_limit",
    "node_rank": "machine_rank",
    "nodes": "nnodes num_nodes num_machines n_nodes",
    "processes": "np n nproc nprocs num_proc num_procs num_processes nproc_per_node world_size processes_per_node "
    "gpus num_gpus",
}
_MESH = "--strategy=mesh --mesh_shape='data:2;model:4'"
_GLOBAL = "It is the global batch size, over all replicas."
REPLACEMENTS = {  # flags that have another syntax here: our flags, and a note
    "accelerator": ("--strategy", ""),
    "amp": ("--precision=mixed_float16", ""),
    "bf16": ("--precision=mixed_bfloat16", ""),
    "bfloat16": ("--precision=mixed_bfloat16", ""),
    "cpu": ("--strategy=single", "GPUs are hidden by CUDA_VISIBLE_DEVICES=-1."),
    "fast_dev_run": ("--steps=1", ""),
    "float16": ("--precision=mixed_float16", ""),
    "fp16": ("--precision=mixed_float16", ""),
    "fp16_allreduce": ("--compression=fp16", ""),
    "gloo": ("--strategy=horovod --communication=gloo", ""),
    "half": ("--precision=mixed_float16", ""),
    "micro_batch_size": ("--accumulate_steps", "Its value is the number of micro-steps of a step."),
    "momentum": ("--optimizer='sgd(momentum=0.9)'", ""),
    "mpi": ("--strategy=horovod --communication=mpi", ""),
    "multi_gpu": ("--strategy=mirrored", ""),
    "per_device_train_batch_size": ("--batch_size", _GLOBAL),
    "per_gpu_train_batch_size": ("--batch_size", _GLOBAL),
    "profiler": ("--profile_steps=10:20", ""),
    "sync_batchnorm": ("--batch_norm=synchronized", ""),
    "sync_bn": ("--batch_norm=synchronized", ""),
    "tensor_model_parallel_size": (_MESH, ""),
    "tensor_parallel_size": (_MESH, ""),
    "torch_compile": ("--jit_compile", ""),
    "tp": (_MESH, ""),
    "train_micro_batch_size_per_gpu": ("--batch_size", _GLOBAL),
    "use_amp": ("--precision=mixed_float16", ""),
    "warmup_ratio": ("--warmup_steps", "Its value is a number of steps."),
    "weight_decay": ("--optimizer='adamw(weight_decay=0.01)'", ""),
    "xla": ("--jit_compile", ""),
}
_LAUNCH = "tfdist launch"
EVERY_COMMAND = "Every command"  # topic of the flags that all commands have
_CLOSED_ERRORS = (errno.EPIPE, errno.EIO)  # errors of writing to a closed pipe or terminal
INTERRUPTED = 130  # exit code of a shell after Ctrl-C
_CONFIG = "config"
_JSON = "helpjson"  # the help as data, for other programs
_HELP = ("help", "helpshort", "helpfull", _JSON)
FILES = {
    "--flagfile": "Read flags from a file, one per line; later flags win.",
    f"--{_CONFIG}": "Read flags from a YAML file that maps their names to values; the command line and --flagfile win.",
}
_KINDS = {"int": "an integer", "float": "a number, such as 0.001", "bool": "true or false"}  # by absl's names of types
HELP_LINE = {"--help": "Show this help."}
_log = logging.getLogger(__name__)


def _invert_aliases(names: Mapping[str, str]) -> dict[str, str]:
    return {alias: flag for flag, aliases in names.items() for alias in aliases.split()}


_FLAG_BY_ALIAS = _invert_aliases(ALIASES)
_LAUNCHER_FLAG_BY_ALIAS = _invert_aliases(LAUNCHER_ALIASES) | {name: name for name in LAUNCHER_ALIASES}


def hint(flag_text: str, known_flags: Mapping[str, Any], program: str) -> str:
    """Returns the flag that an unknown one may mean, as the end of a message such as ` Use --learning_rate=0.1.`.

    Args:
      flag_text: the unknown flag as written by the user, such as "--lr=0.1" or "-np".
      known_flags: the flags of the command, by name, each with a `parser` and `boolean` as in absl.
      program: name of the command, such as "tfdist train".

    Returns:
      The hint, or "" if the flag has no equivalent in this command.
    """
    name, _, value = flag_text.lstrip("-").partition("=")
    name = name.replace("-", "_").lower()
    if name in known_flags:
        return f" Flags are written with underscores, in lower case: {_format_flag(name, value, known_flags[name])}."
    if name.startswith("no_") and name[3:] in known_flags and known_flags[name[3:]].boolean:
        return f" Use --no{name[3:]}."
    if name in REPLACEMENTS:
        suggestion, note = REPLACEMENTS[name]
        flags = [word.removeprefix("--").partition("=")[0] for word in suggestion.split()]
        return f" Use {suggestion}. {note}".rstrip() if all(flag in known_flags for flag in flags) else ""
    if _FLAG_BY_ALIAS.get(name) in known_flags:
        return _suggest_flag(_FLAG_BY_ALIAS[name], value, known_flags[_FLAG_BY_ALIAS[name]])
    if _LAUNCHER_FLAG_BY_ALIAS.get(name) in known_flags:
        return _suggest_flag(_LAUNCHER_FLAG_BY_ALIAS[name], value, known_flags[_LAUNCHER_FLAG_BY_ALIAS[name]])
    if name in _LAUNCHER_FLAG_BY_ALIAS and "strategy" in known_flags:
        return f" The launcher has it: `{_LAUNCH} --{_LAUNCHER_FLAG_BY_ALIAS[name]}={value or 'N'} -- {program} ...`."
    suggestion = _FLAG_BY_ALIAS.get(name, name)
    if name == "local_rank" and "strategy" in known_flags:
        return " Each process learns its rank from the launcher's environment variables: leave it out."
    if "processes" in known_flags and suggestion in TrainConfig.__dataclass_fields__:
        return f" It belongs to the command that is started: write --{suggestion} after `--`."
    is_script_argument = program == "tfdist run" and not difflib.get_close_matches(name, known_flags)
    return " Arguments of the script follow its name." if is_script_argument else ""


def _suggest_flag(name: str, value: str, flag: Any) -> str:
    choices = getattr(flag.parser, "choices", ())
    choices_text = f": {', '.join(choices[:-1])} or {choices[-1]}" if choices and value not in choices else ""
    return f" Use {_format_flag(name, value, flag)}{choices_text}."


def _format_flag(name: str, value: str, flag: Any) -> str:
    """Returns a flag with a value, or without it if the flag does not accept the value."""
    choices = getattr(flag.parser, "choices", ())
    try:
        flag.parser.parse(value)
    except (TypeError, ValueError):
        return f"--{name}"
    return f"--{name}={value}" if value and not flag.boolean and (not choices or value in choices) else f"--{name}"


def render(
    program: str,
    topics: Mapping[str, Sequence[tuple[str, str]]],
    about: str = "",
    arguments: str = "",
    width: int = 100,
    examples: Sequence[str] = (),
) -> str:
    """Returns the help of a command.

    Args:
      program: name of the program.
      topics: by title, the flags of each topic, as pairs of syntax and description.
      about: description of the command.
      arguments: arguments after the flags, such as "-- COMMAND".
      width: maximum width, in characters.
      examples: commands, which are not wrapped.
    """
    column = 4 + max(len(name) for lines in topics.values() for name, _ in lines)
    flags = "" if [*topics] == [EVERY_COMMAND] else "[--flag=value ...] "
    parts = [f"Usage: {program} {flags}{arguments}".rstrip()]
    parts += [textwrap.fill(" ".join(about.split()), width)] if about else []
    for topic, lines in topics.items():
        parts.append("\n".join([f"{topic}:", *(_line(name, text, column, width) for name, text in lines)]))
    if examples:
        parts.append("\n".join(["Examples:", *(f"  {example}" for example in examples)]))
    return "\n\n".join(parts)


def _line(name: str, text: str, column: int, width: int) -> str:
    first = f"  {name}".ljust(column)
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * column,
        break_long_words=False,
        break_on_hyphens=False,
    )


class _HelpRequested(Exception):
    """Raised when `--help` is parsed, which ignores later and unknown flags."""


class _FlagValues(absl_flags.FlagValues):
    """Flag values that raise an error if a flag file includes itself, for which absl only warns."""

    def _get_flag_file_lines(self, filename: str, parsed_file_stack: list[str] | None = None) -> list[str]:
        if filename in (parsed_file_stack or []):
            raise absl_flags.CantOpenFlagFileError(f"flagfile: it includes itself: '{filename}'")
        return list(super()._get_flag_file_lines(filename, parsed_file_stack))


class _HelpFlag(absl_flags.BooleanFlag):
    def parse(self, argument: str | bool) -> None:
        super().parse(argument)
        if self.value:
            raise _HelpRequested(self.name)


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
) -> int:
    """Parses a command line, calls the command and reports errors.

    Args:
      name: name of the command, as in `tfdist <name>`.
      define: defines the command's flags on the given values.
      call: runs the command; takes the parsed values, if `arguments` is given the arguments after the flags, and if `has_json`
        an `Output`; returns an exit code, or None for 0.
      argv: command line, including the program name, or a function that returns it and may raise `InputError`; None for the
        command line of this process.
      about: first sentence of the help.
      arguments: arguments after the flags, for the help; empty if the command takes only flags.
      has_json: whether it has the flag `--json`.
      examples: commands to show at the end of the help.

    Returns:
      The exit code, after flushing all output; the caller exits the process with it.
    """
    program = f"tfdist {name}"
    locations: dict[str, str] = {}
    values = _FlagValues()
    values.set_gnu_getopt(False)  # flags after the first argument may belong to another command
    try:
        define(values)
        if has_json:
            define_json(values)
        for flag in _HELP:
            help_flag = _HelpFlag(flag, False, "", short_name="h" if flag == "help" else None)
            absl_flags.DEFINE_flag(help_flag, values, __name__)
        command_line = argv() if callable(argv) else argv
        remaining_arguments = parse(
            values, list(sys.argv if command_line is None else command_line), program, arguments, locations
        )
        with _stack_on_sigusr1(), naming_flags(), contextlib.ExitStack() as stack:
            call_arguments: list[Any] = [values]
            if arguments:
                call_arguments.append(remaining_arguments)
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
            width = min(shutil.get_terminal_size().columns, 120)
            text = render(program, _topics(values), about, arguments, width, examples)
        with contextlib.suppress(BrokenPipeError):  # `| head` has read enough
            print(text)
        return ExitCode.DONE
    except KeyboardInterrupt:
        return _report(program, "Interrupted.", INTERRUPTED)
    except TfdistError as error:
        _log.debug("Traceback of the error:", exc_info=error)
        code = INTERRUPTED if isinstance(error, Interrupted) else error.exit_code
        return _report(program, _with_location(str(error), locations), code)
    except Exception as error:
        if memory_error := out_of_memory(error):
            _log.debug("Traceback of the cause:", exc_info=error)
            return _report(program, str(memory_error), memory_error.exit_code)
        uncaught = error
    finally:
        flush()
    return _fail(uncaught)  # outside of the handler, to not become the context of an error in the hook


def _fail(error: Exception) -> int:
    try:
        call_excepthook(error)
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


def define_json(values: absl_flags.FlagValues) -> None:
    """Defines `--json`."""
    about = "Print the result as one JSON object, and nothing else, on standard output (docs/reference/json.md)."
    absl_flags.DEFINE_boolean("json", False, about, flag_values=values, module_name="Result")


def parse(
    values: absl_flags.FlagValues,
    argv: list[str],
    program: str,
    arguments: str,
    locations: dict[str, str] | None = None,
) -> list[str]:
    """Parses a command line and returns the arguments after the flags.

    Args:
      values: flag values with all flags defined.
      argv: command line, including the program name.
      program: name of the command in messages.
      arguments: arguments after the flags; empty if the command takes only flags.
      locations: filled with file and line of the flags in `--config`.

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
        remedy = f"A YAML file is for --{_CONFIG}." if re.match(r"\w+: ", remaining_arguments[0]) else remedy
        raise InputError(
            f'Only flags are accepted, written --name=value. Received: "{remaining_arguments[0]}". {remedy}'
        )
    for path in reversed(values[_CONFIG].value or []):  # the last one wins
        _read_config(values, path, program, {} if locations is None else locations)
    return remaining_arguments


def _invalid_value(values: absl_flags.FlagValues, error: Exception) -> str:
    """Returns a sentence about an invalid value, because absl only reports Python's message."""
    match = re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)
    kind = _KINDS.get(values[match[1]].flag_type()) if match and match[1] in values else None
    return f"--{match[1]} must be {kind}. Received: {match[2]}." if match and kind else f"{str(error).rstrip('.')}."


def _unknown_flag(values: absl_flags.FlagValues, flag_text: str, program: str) -> str:
    known_flags = {name: values[name] for name in values if name not in ("h", *_HELP)}
    name = flag_text.partition("=")[0]
    remedy = hint(flag_text, known_flags, program)
    if not remedy:
        similar = did_you_mean(name.lstrip("-"), known_flags, form="--{}")
        remedy = f"{similar} `{program} --help` lists the flags."
    return f"{name} is not a flag of {program}.{remedy}"


def _read_config(values: absl_flags.FlagValues, path: str, program: str, locations: dict[str, str]) -> None:
    """Sets the flags of a configuration file that are not set yet."""
    for entry in read(path):
        if entry.name not in values or entry.name in ("h", _CONFIG, *_HELP):
            problem = _unknown_flag(values, f"--{entry.name}={entry.text}", program)
            raise InputError(f"{entry.location}: {problem.removeprefix('--')}")
        flag = values[entry.name]
        if entry.kind not in (str, getattr(flag.parser, "structure", str)):
            raise InputError(f"{entry.location}: {entry.name} must be {KINDS[str]}. Received: {KINDS[entry.kind]}.")
        if flag.present:
            continue
        try:
            flag.parse(entry.boolean if flag.boolean and entry.boolean else entry.text)
        except absl_flags.Error as error:
            raise InputError(f"{entry.location}: {_invalid_value(values, error)}") from error
        locations[entry.name] = entry.location


def _with_location(message: str, locations: Mapping[str, str]) -> str:
    """Adds the file and line of the first flag in a message that was read from a configuration file."""
    flags = [name for name in re.findall(r"--(\w+)", message) if name in locations]
    return f"{message.rstrip('.')}. --{flags[0]} is from {locations[flags[0]]}." if flags else message


def only_argument(arguments: list[str], rule: str, remedy: str) -> str:
    """Returns the single argument after the flags.

    Raises:
      InputError: there is not exactly one argument.
    """
    if len(arguments) != 1:
        raise InputError(f"{rule} Received: {len(arguments)} arguments. {remedy}")
    return arguments[0]


def _topics(values: absl_flags.FlagValues) -> dict[str, list[tuple[str, str]]]:
    topics: dict[str, list[tuple[str, str]]] = {}
    for topic, flag in _command_flags(values):
        topics.setdefault(topic, []).append(_syntax_and_help(flag))
    files = FILES if topics else {}
    if ignored_flags := topics.pop(NO_EFFECT_HELP, []):
        topics[NO_EFFECT_HELP] = [
            ("", ", ".join(f"--{name.removeprefix('--').removeprefix('[no]')}" for name, _ in ignored_flags))
        ]
    return {**topics, EVERY_COMMAND: [*files.items(), *HELP_LINE.items()]}


def _command_flags(values: absl_flags.FlagValues) -> Iterator[tuple[str, absl_flags.Flag]]:
    """Yields topics and flags, in the order of the help.

    The topic is the module name of a flag if it is capitalized, unlike real module names.
    """
    for module, flags in values.flags_by_module_dict().items():
        for flag in flags:
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
    """Flushes stdout and stderr; output without a reader is dropped.

    Args:
      ignore_errors: whether to also drop output that cannot be written for another reason, such as a full disk.
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
