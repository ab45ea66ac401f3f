"""Parses comma-separated compound values, `name, other(key=value)`."""

from tfdist.errors import InputError
from tfdist.grammar.rules import split_outside_brackets
from tfdist.grammar.spec import Spec, parse


def parse_specs(text: str) -> list[Spec]:
    """Returns the specs in a text; see `parse`. Commas in parentheses or quotes belong to a spec.

    Raises:
      InputError: a spec does not follow the grammar, or a name is there twice.
    """
    specs = [parse(part) for part in split_outside(text)]
    names = [spec.name for spec in specs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"{twice[0]} is given twice")
    return specs


def split_outside(text: str) -> list[str]:
    """Splits a text at commas outside of parentheses and quotes; without parts that are empty."""
    return [part.strip() for part in split_outside_brackets(text, ",") if part.strip()]
