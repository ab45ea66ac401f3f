"""Defines flags as dataclass fields: help text, topic, range, known names, and validation."""

import copy
import dataclasses
import inspect
import math
import os.path
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from tfdist.cluster import tf_config
from tfdist.config.layouts import rules_text, split_rules
from tfdist.config.rules import parse_specs
from tfdist.config.spec import Spec, parse
from tfdist.errors import InputError
from tfdist.errors.formatting import is_integer, is_number, nearest
from tfdist.storage import path_of, storage_of

_OF_FILES = {".csv": "csv", ".npz": "npz", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord", ".tsv": "csv"}
_OF_TFDS = ("cifar10", "cifar100", "imagenet2012", "mnist")
MODEL = "Model and data"
DURATION = "Duration"
DEVICES = "Strategy and devices"
TRAINING = "Training"
GRADIENTS = "Gradients"
OUTPUT = "Output and checkpoints"
CHECKS = "Checks"
TOPICS = (MODEL, DURATION, DEVICES, TRAINING, GRADIENTS, OUTPUT, CHECKS)  # in the order of --help
WITHOUT_EFFECT = "Accepted but ignored, so that flag files of tfdist train can be used"
# Names of values in other libraries, and the corresponding values here.
_SYNONYMS = {
    "16": "mixed_float16",
    "16-mixed": "mixed_float16",
    "32": "float32",
    "bf16": "mixed_bfloat16",
    "bf16-mixed": "mixed_bfloat16",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
    "fp16": "mixed_float16",
    "fp32": "float32",
    "half": "mixed_float16",
    "sync": "synchronized",
}
Config = TypeVar("Config")
ANY_TEXT = ".*"  # for `Flag.safe_values`
CATALOG_NAME = r"\w+"  # resolved by a catalog of the library or of Keras only
LOGGERS = ("tensorboard", "mlflow", "wandb")
AUTO = "auto"  # searches for a layout


def check_name(flag: str, text: str, known: tuple[str, ...]) -> None:
    """Checks the name in a value of a flag.

    Args:
      flag: name of the flag.
      text: its value, which `parse` accepts.
      known: the names that it may have, besides `package.module:function`; an argument follows one that ends in a colon.

    Raises:
      InputError: the name is unknown.
    """
    name = parse(text).name
    if ":" not in name and name not in known and f"{name}:" not in known:
        names = [known_name.rstrip(":") for known_name in known]
        raise InputError(f"--{flag}={text} is not known.{nearest(name, names)} {_remedy(name, known)}")


def _is_directory(name: str) -> bool:
    path = path_of(name)
    return storage_of(path).is_directory(path)


def _remedy(name: str, known: tuple[str, ...]) -> str:
    kind = "images" if _is_directory(name) else _OF_FILES.get(os.path.splitext(name)[1], "")
    if kind and f"{kind}:" in known:
        return f"Write {kind}:{name}."
    if name in _OF_TFDS and "tfds:" in known:
        return f"Write tfds:{name}."
    module, _, attribute = name.rpartition(".")
    return f"Your own is {module or 'package.module'}:{attribute if module else 'function'}."


class Flag(NamedTuple):
    """Help and validation of a field.

    Attributes:
      topic: group of the flag in the help.
      help: description, with unit and range.
      least: minimum of a number.
      most: maximum of a number.
      choices: the only allowed texts, if any.
      check: validates a text and returns its normalized form; raises `InputError`. Without `check`, that is the text of what
        `parse` returns; of a list, with commas between.
      parse: returns the typed value of a text, which is `config.parsed.NAME`; raises `InputError`. Not called for an empty
        text that is the default, whose value is None.
      is_option: whether it is passed to the strategy, if its constructor takes it.
      neutral_values: of an option, the values that strategies without it accept; empty if they ignore it.
      per_process: whether it may differ between the processes of a job.
      fixed: whether a resumed run must have the same value.
      training_only: whether it affects training only, so that exporting a model ignores it.
      trial_value: its value in trials of a batch size, which leave out what is neither part of a step nor changes its cost;
        None for the value of the command.
      structure: `list` if a text has parts with commas between, `dict` if it has pairs `a: b` with semicolons between:
        a configuration file may write it so.
      known: names that it may have, besides others, for completion.
      known_only: whether these are all names, except for `package.module:function`.
      safe_values: regular expression of the names in a text that a run directory may give in safe mode, besides the default
        and `choices`: those by which nothing is imported, called or connected to that the run could choose.
    """

    topic: str
    help: str
    least: float = 0
    most: float = math.inf
    choices: tuple[str, ...] = ()
    check: Callable[[str], str] | None = None
    parse: Callable[[str], Any] | None = None
    is_option: bool = False
    neutral_values: tuple[Any, ...] = ()
    per_process: bool = False
    fixed: bool = False
    training_only: bool = False
    trial_value: Any = None
    structure: type = str
    known: tuple[str, ...] = ()
    known_only: bool = False
    safe_values: str = ""


def number_or_spec_text(text: str) -> str:
    """Accepts a number, or normalizes `name(key=value, ...)`."""
    try:
        float(text or 1)
    except ValueError:
        return str(parse(text))
    return text


def names_text(text: str) -> str:
    """Normalizes comma-separated names."""
    names = [name.strip() for name in text.split(",")] if text else []
    if not all(re.fullmatch(r"\w+", name) for name in names):
        raise InputError(f"{text} must be comma-separated names. Write accuracy, or accuracy,mean_absolute_error")
    return ",".join(names)


def parse_loggers(text: str) -> list[Spec]:
    """Parses comma-separated loggers; may be empty."""
    specs = parse_specs(text)
    for spec in specs:
        if spec.name not in LOGGERS and ":" not in spec.name:
            raise InputError(f"{spec.name} is not a logger.{nearest(spec.name, LOGGERS)}")
    return specs


def layout_text(text: str) -> str:
    """Normalizes the rules of a layout."""
    if text == AUTO:
        raise InputError("auto is only for `tfdist layout`, which prints the layout that it finds as a flag")
    return rules_text(split_rules(text))


def address_text(text: str) -> str:
    """Validates HOST:PORT; may be empty."""
    if text and not tf_config.is_address(text):
        raise InputError(f"{text} must be HOST:PORT with a port in [1, 65535]")
    return text


def own_text(text: str) -> str:
    """Normalizes `package.module:name(key=value, ...)`; may be empty."""
    spec = parse(text) if text else None
    if spec and ":" not in spec.name:
        raise InputError(f"{text} must be package.module:function, or package.module:function(key=value, ...)")
    return str(spec or "")


def parse_step_range(text: str) -> tuple[int, int]:
    """Parses A:B, two step numbers; raises `InputError`."""
    match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise InputError(f"{text} must be A:B, two step numbers with 0 <= A < B. Write 10:20")
    return int(match[1]), int(match[2])


def flag_field(default: Any, *args: Any, **more: Any) -> Any:
    """Returns a dataclass field with a flag; takes the default, followed by the arguments of `Flag`."""
    return dataclasses.field(default=default, metadata={"flag": Flag(*args, **more)})


def field_names(config: Any, trait: str) -> tuple[str, ...]:
    """Returns the names of a configuration's fields whose `Flag` has a trait, such as "per_process"."""
    return tuple(field.name for field in dataclasses.fields(config) if getattr(field.metadata["flag"], trait))


def unsafe_fields(config: Any) -> list[str]:
    """Returns the names of the fields whose values a run directory may not give in safe mode; see `Flag.safe_values`."""
    flags = {field.name: field.metadata["flag"] for field in dataclasses.fields(config)}
    others = [field for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]
    texts = {field.name: getattr(config, field.name) for field in others if not flags[field.name].choices}
    # No dicts, which Keras takes for descriptions of objects to import. Values have been normalized by `check`.
    allowed = {name: rf"({flags[name].safe_values})(\([^{{]*\))?" for name in texts}
    return [name for name, text in texts.items() if isinstance(text, str) and not re.fullmatch(allowed[name], text)]


def takes_options(config: Any, trait: str = "") -> Callable[[Callable], Callable]:
    """Returns a decorator that shows a configuration's fields in the signature of a function, instead of `**options`.

    Args:
      config: the configuration.
      trait: only fields with this trait are shown; "" shows all.
    """

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in dataclasses.fields(config)
            if f.name not in signature.parameters and (not trait or getattr(f.metadata["flag"], trait))
        ]
        returned = signature.return_annotation
        function.__signature__ = inspect.Signature([*named, *parameters], return_annotation=returned)  # type: ignore[attr-defined]
        return function

    return decorate


class Flags:
    """Base class of configurations.

    Attributes:
      parsed: typed values of the flags, by name; see `Flag.parse`.
    """

    parsed: types.SimpleNamespace


def check_fields(config: Any) -> None:
    """Validates all fields of a frozen configuration, replaces their values by the normalized ones, and sets `parsed`.

    Raises:
      InputError: a value does not match the field's type or its `Flag`.
    """
    parsed = types.SimpleNamespace()
    for field in dataclasses.fields(config):
        value, parsed.__dict__[field.name] = checked(field, getattr(config, field.name))
        object.__setattr__(config, field.name, value)
    object.__setattr__(config, "parsed", parsed)


def replaced(config: Config, **values: Any) -> Config:
    """Returns a copy of a configuration with other values that are known to be valid, of fields that are not parsed."""
    copied = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(copied, name, value)
    return copied


def checked(field: dataclasses.Field, value: Any) -> tuple[Any, Any]:
    """Returns the normalized value of a field with a flag, and the typed one; raises `InputError` if it is not one."""
    flag: Flag = field.metadata["flag"]
    optional = field.default is None
    kind: Any = str if optional else type(field.default)
    if optional and value in (None, ""):
        return None, None
    if (kind is int and is_integer(value)) or (kind is float and is_number(value)):
        value = kind(value)
    if type(value) is not kind:
        raise InputError(f"{field.name} must be of type {kind.__name__}. Received: {value!r}.")
    if kind is str:
        return _checked_text(field, value)
    if not (flag.least <= value <= flag.most and math.isfinite(value)):
        most = f"at most {flag.most}" if math.isfinite(flag.most) else "finite"
        raise InputError(f"--{field.name} must be at least {flag.least} and {most}. Received: {value}.")
    return value, value


def _checked_text(field: dataclasses.Field, value: str) -> tuple[str, Any]:
    name, flag = field.name, field.metadata["flag"]
    text, parsed = value.strip(), None
    try:
        if flag.check:
            text = flag.check(text)
        if flag.parse and (text or field.default):
            parsed = flag.parse(text)
            normal = ",".join(map(str, parsed)) if isinstance(parsed, list) else str(parsed)
            text = text if flag.check else normal
    except InputError as error:
        raise InputError(f"--{name}: {error}".rstrip(".") + ".") from error
    if not text.isprintable():  # because it must fit in one line of a flagfile, and in the environment
        raise InputError(f"--{name} must be one line of printable text. Received: {text!r}.")
    if flag.choices and text not in flag.choices:
        synonym = _SYNONYMS.get(text.lower(), text)
        raise InputError(
            f"--{name}={text} is not known.{nearest(synonym if synonym in flag.choices else text, flag.choices)}"
        )
    if flag.known_only:
        check_name(name, text, flag.known)
    return text, parsed
