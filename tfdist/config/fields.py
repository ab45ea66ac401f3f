"""One flag: what the command line says of it, what it may hold, and how its text is checked."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tfdist.cluster import tf_config
from tfdist.errors import InputError
from tfdist.grammar.decay import parse_decay
from tfdist.grammar.interval import parse_period
from tfdist.grammar.rules import parse_rules
from tfdist.grammar.spec import nearest, parse
from tfdist.sharding.layouts import rules_text, split_rules
from tfdist.sharding.mesh import parse_mesh


class Flag(NamedTuple):
    """What the command line says of a field, and what the field may hold beyond its type.

    Attributes:
      topic: the group of the help in which it stands.
      help: its meaning, with unit and range.
      least: the smallest number.
      most: the largest number.
      choices: the only texts.
      check: raises `InputError`, or returns the text as it is kept.
    """

    topic: str
    help: str
    least: float = 0
    most: float = math.inf
    choices: tuple[str, ...] = ()
    check: Callable[[str], str] = str


def spec_text(text: str) -> str:
    """A name with arguments, as `parse` writes it."""
    return str(parse(text))


def number_or_spec_text(text: str) -> str:
    """A number, or a name with arguments."""
    try:
        float(text or 1)
    except ValueError:
        return spec_text(text)
    return text


def methods_text(text: str) -> str:
    """Rules that say how gradients travel."""
    parse_rules(text)
    return text


def decay_text(text: str) -> str:
    """A way in which the rate falls."""
    parse_decay(text)
    return spec_text(text)


def names_text(text: str) -> str:
    """Names with commas between."""
    names = [name.strip() for name in text.split(",")] if text else []
    if not all(re.fullmatch(r"\w+", name) for name in names):
        raise InputError(f"{text} must be names with commas between. Write accuracy, or accuracy,mean_absolute_error")
    return ",".join(names)


def mesh_text(text: str) -> str:
    """A mesh's axes, or nothing."""
    return str(parse_mesh(text)) if text else ""


AUTO = "auto"  # a layout that is searched for


def layout_text(text: str) -> str:
    """Rules of a layout."""
    if text == AUTO:
        raise InputError("auto is searched for by `python -m tfdist.layout`, which prints it as a flag")
    return rules_text(split_rules(text))


def address_text(text: str) -> str:
    """HOST:PORT, or nothing."""
    if text and not tf_config.is_address(text):
        raise InputError(f"{text} must be HOST:PORT with a port in [1, 65535]")
    return text


def period_text(text: str) -> str:
    """Steps, or seconds; see `parse_period`."""
    parse_period(text)
    return text


def window_text(text: str) -> str:
    """A:B, two numbers of steps, or nothing."""
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", text)
    if text and not (found and int(found[1]) < int(found[2])):
        raise InputError(f"{text} must be A:B with 0 <= A < B, two numbers of steps. Write 10:20")
    return text


def flag_field(default: Any, *args: Any, **more: Any) -> Any:
    """A configuration's field with its flag; takes the default, and then what `Flag` takes."""
    return dataclasses.field(default=default, metadata={"flag": Flag(*args, **more)})


def check_fields(config: Any) -> None:
    """Checks each field of a configuration, which is frozen, and puts in its place the value as it is kept.

    Raises:
      InputError: a field's type or its `Flag` forbids the value.
    """
    for field in dataclasses.fields(config):
        object.__setattr__(config, field.name, _checked(field, getattr(config, field.name)))


def _checked(field: dataclasses.Field, value: Any) -> Any:
    flag: Flag = field.metadata["flag"]
    optional = field.default is None
    kind = str if optional else type(field.default)
    if optional and value in (None, ""):
        return None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise InputError(f"{field.name} must be of type {kind.__name__}. Received: {value!r}.")
    check: Callable[[str, Flag, Any], Any] = _checked_text if kind is str else _checked_number
    return check(field.name, flag, value)


def _checked_text(name: str, flag: Flag, value: str) -> str:
    text = value.strip()
    try:
        text = flag.check(text)
    except InputError as error:
        raise InputError(f"--{name}: {error}".rstrip(".") + ".") from error
    if not text.isprintable():  # it has to stand in one line of a flagfile, and in the environment
        raise InputError(f"--{name} must be printable text in one line. Received: {text!r}.")
    if flag.choices and text not in flag.choices:
        raise InputError(f"--{name}={text} is not known.{nearest(text, flag.choices)}")
    return text


def _checked_number(name: str, flag: Flag, value: float) -> float:
    if not (flag.least <= value <= flag.most and math.isfinite(value)):
        most = f"at most {flag.most}" if math.isfinite(flag.most) else "finite"
        raise InputError(f"--{name} must be at least {flag.least} and {most}. Received: {value}.")
    return value
