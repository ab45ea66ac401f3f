"""Defines values such as `cosine(to=0.1)` as dataclasses, whose fields state what the parameters accept."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from tfdist.config.spec import call, parse, spec_of
from tfdist.errors import InputError, as_python, is_integer, is_number, nearest

REQUIRED = dataclasses.MISSING  # marks a parameter without a default
Kind = TypeVar("Kind", bound="Parameters")


def parameter(default: Any, accepts: Callable[[Any], bool], values: str) -> Any:
    """Returns the field of a parameter; `values` describes what it accepts. None is accepted only as the default."""
    metadata = {"accepts": lambda value: accepts(value) or value is default is None, "values": values}
    return dataclasses.field(default=default, metadata=metadata)


def integer(default: Any, minimum: int, unit: str) -> Any:
    """Returns the field of an integer of at least `minimum`; `unit` is what it counts, in the plural."""
    return parameter(
        default, lambda value: is_integer(value) and value >= minimum, f"a number of {unit}, at least {minimum}"
    )


def number(default: Any, interval: str) -> Any:
    """Returns the field of a finite number in an interval, such as "[0, 1)" or "(0, inf)"."""
    low, high = map(float, interval[1:-1].split(","))

    def accepts(value: Any) -> bool:
        if not is_number(value) or not math.isfinite(value):
            return False
        return (low < value or interval[0] == "[" and low == value) and (
            value < high or interval[-1] == "]" and value == high
        )

    return parameter(default, accepts, f"a number in {interval}")


def boolean(default: bool) -> Any:
    """Returns the field of a bool."""
    return parameter(default, lambda value: isinstance(value, bool), "True or False")


def choice(default: str, words: tuple[str, ...]) -> Any:
    """Returns the field of one of several words."""
    return parameter(default, lambda value: value in words, f"{', '.join(words[:-1])} or {words[-1]}")


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Base class of values with a name and parameters.

    Raises:
      InputError: a parameter has a value that its field does not accept.
    """

    name: ClassVar[str]  # name of the value in the flag
    guide: ClassVar[str] = ""  # page that explains the parameters, for error messages; may be empty

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata and not field.metadata["accepts"](value):
                raise self.invalid(f"{field.name} must be {field.metadata['values']}", repr(value))
            if is_number(value):
                object.__setattr__(self, field.name, as_python(value))

    def invalid(self, rule: str, received: Any) -> InputError:
        """Returns the error for parameters that violate a rule."""
        remedy = f" {self.guide} explains the parameters." if self.guide else ""
        return InputError(f"{self.name}: {rule}. Received: {received}.{remedy}")

    def __str__(self) -> str:
        return str(spec_of(self))


def parse_kind(
    text: str, kinds: Mapping[str, type[Kind]], noun: str, words: Iterable[str] = (), remedy: str = ""
) -> Kind:
    """Parses `name` or `name(key=value, ...)`, where `name` is that of a class in `kinds`; see `parse` for `words`.

    The message about an unknown name says that it is no known `noun`, and ends with the remedy.
    """
    spec = parse(text, words)
    if spec.name not in kinds:
        raise InputError(f"{spec.name} is not a known {noun}.{nearest(spec.name, kinds)}{remedy}")
    kind: Kind = call(kinds[spec.name], spec)
    return kind
