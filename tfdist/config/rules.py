"""Parses lists and chains of specs, and rules for variables: `path=.*embedding.*: none; size>=10000: topk(ratio=0.05)|fp16`.

The first rule whose condition matches a variable applies. A string without a condition is one rule for all variables.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from tfdist.config.spec import Spec, parse
from tfdist.errors import InputError

_CONDITION = re.compile(r"\s*(\*|path=(?P<path>.+?)|size>=(?P<size>\d{1,18}))\s*", re.DOTALL)
# Methods for gradients only: they send no magnitudes, or keep a momentum.
GRADIENT_METHODS = ("signsgd", "dgc")
_GRAMMAR = (
    "Rules are CONDITION: METHOD, separated by ;. A condition is path=REGEX, size>=ELEMENTS or *. A method is "
    "name(key=value, ...); methods separated by | are applied one after the other."
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on variables and the methods for them."""

    path: str | None  # regular expression that must match a variable's whole path; None for any
    size: int  # minimum number of elements
    methods: tuple[Spec, ...]  # methods to apply one after the other

    def __str__(self) -> str:
        return "|".join(map(str, self.methods))

    def applies_to(self, path: str, size: int) -> bool:
        """Returns whether the rule applies to a variable with this path and number of elements."""
        return size >= self.size and (self.path is None or re.fullmatch(self.path, path) is not None)


def parse_rules(text: str) -> list[Rule]:
    """Parses rules, at least one; raises `InputError`."""
    rules = [_parse_rule(part) for part in split_outside_brackets(text, ";") if part.strip()]
    if not rules:
        raise InputError(f"{text!r} names no method. {_GRAMMAR}")
    return rules


def user_methods(text: str) -> set[str]:
    """Returns the user-defined methods in rules, as `package.module:name`."""
    return {name for name in method_names(parse_rules(text)) if ":" in name}


def first_match(rules: Sequence[Rule], path: str, size: int) -> Rule | None:
    """Returns the first rule that applies to a variable, or None."""
    return next((rule for rule in rules if rule.applies_to(path, size)), None)


def _parse_rule(text: str) -> Rule:
    condition, *method_parts = split_outside_brackets(text, ":")
    if not method_parts:
        condition, *method_parts = text.split(":", 1)  # an unclosed bracket, reported below
    match = _CONDITION.fullmatch(condition) if method_parts else None
    path, size, methods = (match["path"], int(match["size"] or 0), ":".join(method_parts)) if match else (None, 0, text)
    if path is not None:
        try:
            re.compile(path)
        except re.error as error:
            raise InputError(f"path={path} is not a regular expression: {error}. {_GRAMMAR}") from error
    return Rule(path, size, tuple(parse(method) for method in split_outside_brackets(methods, "|")))


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Splits at a separator outside brackets and quotes."""
    parts, start, depth, quote = [], 0, 0, ""
    for position, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == separator and not depth:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def parse_specs(text: str) -> list[Spec]:
    """Parses comma-separated specs with different names; see `parse`."""
    specs = [parse(part) for part in split_at_commas(text)]
    names = [spec.name for spec in specs]
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise InputError(f"{duplicates[0]} is specified twice")
    return specs


def split_at_commas(text: str) -> list[str]:
    """Splits a string at commas outside brackets and quotes, and drops empty parts."""
    return [part.strip() for part in split_outside_brackets(text, ",") if part.strip()]


def parse_chain(text: str) -> tuple[Spec, ...]:
    """Parses a chain of specs separated by `|`; may be empty."""
    parts = split_outside_brackets(text, "|") if text.strip() else []
    if not all(part.strip() for part in parts):
        raise InputError(f"{text} must be specs with | between them. Write flip|crop(padding=4)")
    return tuple(map(parse, parts))


def method_names(rules: Iterable[Rule]) -> set[str]:
    """Returns the names of the methods in rules."""
    return {method.name for rule in rules for method in rule.methods}


def is_auto(rules: Iterable[Rule]) -> bool:
    """Returns whether a method is `auto`, which selects methods by measurement."""
    return "auto" in method_names(rules)


def has_gradient_method(rules: Iterable[Rule]) -> bool:
    """Returns whether a method compresses gradients only, and not exchanged weights."""
    return not method_names(rules).isdisjoint(GRADIENT_METHODS)
