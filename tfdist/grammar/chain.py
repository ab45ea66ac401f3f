"""Parses chains, `flip|crop(padding=4)`: specs that are applied one after the other."""

from tfdist.errors import InputError
from tfdist.grammar.rules import split_outside_brackets
from tfdist.grammar.spec import Spec, parse


def parse_chain(text: str) -> tuple[Spec, ...]:
    """Parses specs with `|` between them; an empty text is an empty chain.

    Raises:
      InputError: `text` does not follow the grammar.
    """
    parts = split_outside_brackets(text, "|") if text.strip() else []
    if not all(part.strip() for part in parts):
        raise InputError(f"{text} must be specs with | between them. Write flip|crop(padding=4)")
    return tuple(map(parse, parts))
