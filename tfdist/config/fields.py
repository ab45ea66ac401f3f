"""Declares flags as dataclass fields, and validates and parses their values."""

import copy
import dataclasses
import inspect
import math
import os.path
import re
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from tfdist.cluster import tf_config
from tfdist.config.layouts import rules_text, split_rules
from tfdist.config.rules import parse_specs
from tfdist.config.spec import Spec, parse
from tfdist.errors import InputError, is_integer, is_number, nearest
from tfdist.storage import path_of, storage_of

_FILE_KINDS = {".csv": "csv", ".npz": "npz", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord", ".tsv": "csv"}
_TFDS_NAMES = ("cifar10", "cifar100", "imagenet2012", "mnist")
MODEL = "Model and data"
DURATION = "Duration"
DEVICES = "Strategy and devices"
TRAINING = "Training"
GRADIENTS = "Gradients"
OUTPUT = "Output and checkpoints"
CHECKS = "Checks"
TOPICS = (MODEL, DURATION, DEVICES, TRAINING, GRADIENTS, OUTPUT, CHECKS)  # in the order of --help
NO_EFFECT_HELP = "Accepted but ignored, so that flag files of tfdist train can be used"
# Names of precisions in other libraries, and in tfdist.
_SYNONYMS = {"16": "mixed_float16", "fp16": "mixed_float16", "half": "mixed_float16", "bf16": "mixed_bfloat16"}
Config = TypeVar("Config")
ANY_TEXT = ".*"  # for `Flag.safe_values`
CATALOG_NAME = r"\w+"  # resolved by a catalog of the library or of Keras only
LOGGERS = ("tensorboard", "mlflow", "wandb")
AUTO = "auto"  # the value of --layout that starts a search for a layout


def check_name(flag: str, text: str, known_names: tuple[str, ...]) -> None:
    """Raises `InputError` if the name in a flag's value is neither known nor `package.module:function`.

    A known name that ends in a colon takes an argument.
    """
    name = parse(text).name
    if ":" not in name and name not in known_names and f"{name}:" not in known_names:
        suggestions = [known_name.rstrip(":") for known_name in known_names]
        raise InputError(f"--{flag}={text} is not known.{nearest(name, suggestions)} {_remedy(name, known_names)}")


def _remedy(name: str, known_names: tuple[str, ...]) -> str:
    path = path_of(name)
    kind = "images" if storage_of(path).is_directory(path) else _FILE_KINDS.get(os.path.splitext(name)[1], "")
    if kind and f"{kind}:" in known_names:
        return f"Write {kind}:{name}."
    if name in _TFDS_NAMES and "tfds:" in known_names:
        return f"Write tfds:{name}."
    module, _, attribute = name.rpartition(".")
    return f"For your own function, use {module or 'package.module'}:{attribute if module else 'function'}."


class Flag(NamedTuple):
    """Help and validation of a field."""

    topic: str  # group of the flag in the help
    help: str  # description, with unit and range
    minimum: float = 0  # smallest allowed number
    maximum: float = math.inf  # largest allowed number
    choices: tuple[str, ...] = ()  # the allowed strings; empty if any string is allowed
    # Validates and normalizes a string; raises `InputError`. Defaults to the string form of the value that `parse`
    # returns (joined by commas for a list).
    check: Callable[[str], str] | None = None
    # Converts a string to the typed value `config.parsed.NAME`; raises `InputError`. Not called for an empty default,
    # whose typed value is None.
    parse: Callable[[str], Any] | None = None
    is_option: bool = False  # whether it is passed to strategies whose constructors take it
    # Values of an option that all other strategies accept; empty if they ignore the option.
    neutral_values: tuple[Any, ...] = ()
    per_process: bool = False  # whether it may differ between the processes of a job
    fixed: bool = False  # whether a resumed run must have the same value
    training_only: bool = False  # whether it affects training only, and is ignored when a model is exported
    known: tuple[str, ...] = ()  # the only valid names, besides `package.module:function`; empty for no restriction
    # Regular expression of the names that a run directory may contain in safe mode, besides the default and `choices`.
    # Such a name must not let the run choose what the command imports, calls or connects to.
    safe_values: str = ""


def normalize_number_or_spec(text: str) -> str:
    """Accepts a number, or normalizes `name(key=value, ...)`."""
    try:
        float(text or 1)
    except ValueError:
        return str(parse(text))
    return text


def parse_known_names(text: str, known_names: Iterable[str], noun: str) -> list[str]:
    """Parses comma-separated names of `noun`; raises `InputError` for an unknown name."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known_names:
            raise InputError(f"{name} is not {noun}.{nearest(name, known_names)}")
    return names


def normalize_names(text: str) -> str:
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


def normalize_layout(text: str) -> str:
    """Normalizes the rules of a layout."""
    if text == AUTO:
        raise InputError("auto is only for `tfdist layout`, which prints the layout that it finds as a flag")
    return rules_text(split_rules(text))


def normalize_address(text: str) -> str:
    """Validates HOST:PORT; may be empty."""
    if text and not tf_config.is_address(text):
        raise InputError(f"{text} must be HOST:PORT with a port in [1, 65535]")
    return text


def normalize_user_function(text: str) -> str:
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


def flag_field(default: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns a dataclass field with a flag; takes the default, followed by the arguments of `Flag`."""
    return dataclasses.field(default=default, metadata={"flag": Flag(*args, **kwargs)})


def _flags_of(topic: str) -> Callable[..., Any]:
    def topic_flag(default: Any, help: str, **kwargs: Any) -> Any:
        return flag_field(default, topic, help, **kwargs)

    return topic_flag


# Like `flag_field`, without the topic.
model_flag, duration_flag, device_flag, training_flag = map(_flags_of, (MODEL, DURATION, DEVICES, TRAINING))
gradient_flag, output_flag, check_flag = map(_flags_of, (GRADIENTS, OUTPUT, CHECKS))


def strategy_option(default: Any, help: str, **kwargs: Any) -> Any:
    """Returns the field of an option of strategies, for which the others accept only the default."""
    return device_flag(default, help, is_option=True, **{"neutral_values": (default,)} | kwargs)


def field_names(config: Any, trait: str) -> tuple[str, ...]:
    """Returns the names of the fields whose `Flag` has a trait, such as "per_process"."""
    return tuple(field.name for field in dataclasses.fields(config) if getattr(field.metadata["flag"], trait))


def unsafe_fields(config: Any) -> list[str]:
    """Returns the names of the fields whose values are not allowed in safe mode; see `Flag.safe_values`."""
    flags = {field.name: field.metadata["flag"] for field in dataclasses.fields(config)}
    changed_fields = [field for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]
    texts = {field.name: getattr(config, field.name) for field in changed_fields if not flags[field.name].choices}
    # Dicts are excluded, because Keras deserializes them to objects of any module. Values are already normalized.
    patterns = {name: rf"({flags[name].safe_values})(\([^{{]*\))?" for name in texts}
    return [name for name, text in texts.items() if isinstance(text, str) and not re.fullmatch(patterns[name], text)]


def takes_options(config: Any, trait: str = "") -> Callable[[Callable], Callable]:
    """Returns a decorator that replaces `**options` in a signature by a configuration's fields, or those with a trait."""

    def decorate(fn: Callable) -> Callable:
        signature = inspect.signature(fn)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
            for f in dataclasses.fields(config)
            if f.name not in signature.parameters and (not trait or getattr(f.metadata["flag"], trait))
        ]
        new_signature = inspect.Signature(parameters, return_annotation=signature.return_annotation)
        fn.__signature__ = new_signature  # type: ignore[attr-defined]
        return fn

    return decorate


class Flags:
    """Base class of configurations.

    Attributes:
      parsed: typed values of the flags, by name; see `Flag.parse`.
    """

    parsed: types.SimpleNamespace


def check_fields(config: Any) -> None:
    """Validates and normalizes all fields of a frozen configuration, by their types and `Flag`s, and sets `parsed`."""
    parsed = types.SimpleNamespace()
    for field in dataclasses.fields(config):
        value, parsed.__dict__[field.name] = normalize_field(field, getattr(config, field.name))
        object.__setattr__(config, field.name, value)
    object.__setattr__(config, "parsed", parsed)


def replace_fields(config: Config, **values: Any) -> Config:
    """Returns a copy of a configuration with new values, which are not validated or parsed."""
    config = copy.copy(config)
    for name, value in values.items():
        object.__setattr__(config, name, value)
    return config


def normalize_field(field: dataclasses.Field, value: Any) -> tuple[Any, Any]:
    """Returns the normalized value and the typed value of a field; raises `InputError` if the value is invalid."""
    flag: Flag = field.metadata["flag"]
    is_optional = field.default is None
    kind: Any = str if is_optional else type(field.default)
    if is_optional and value in (None, ""):
        return None, None
    if (kind is int and is_integer(value)) or (kind is float and is_number(value)):
        value = kind(value)
    if type(value) is not kind:
        raise InputError(f"{field.name} must be of type {kind.__name__}. Received: {value!r}.")
    if kind is str:
        return _normalize_text(field, value)
    if not (flag.minimum <= value <= flag.maximum and math.isfinite(value)):
        upper_rule = f"at most {flag.maximum}" if math.isfinite(flag.maximum) else "finite"
        raise InputError(f"--{field.name} must be at least {flag.minimum} and {upper_rule}. Received: {value}.")
    return value, value


def _normalize_text(field: dataclasses.Field, value: str) -> tuple[str, Any]:
    name, flag = field.name, field.metadata["flag"]
    text, parsed = value.strip(), None
    try:
        if flag.check:
            text = flag.check(text)
        if flag.parse and (text or field.default):
            parsed = flag.parse(text)
            if not flag.check:
                text = ",".join(map(str, parsed)) if isinstance(parsed, list) else str(parsed)
    except InputError as error:
        raise InputError(f"--{name}: {error}".rstrip(".") + ".") from error
    if not text.isprintable():  # it must fit in one line of a flagfile and in the environment
        raise InputError(f"--{name} must be one line of printable text. Received: {text!r}.")
    if flag.choices and text not in flag.choices:
        synonym = _SYNONYMS.get(text.removesuffix("-mixed"), text)
        raise InputError(f"--{name}={text} is not known.{nearest(synonym, flag.choices)}")
    if flag.known:
        check_name(name, text, flag.known)
    return text, parsed
