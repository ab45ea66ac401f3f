"""Formats the text of `--help` in two columns, by topic."""

import textwrap
from collections.abc import Mapping, Sequence

EVERY_COMMAND = "Every command"  # topic of the flags that each command has


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
      program: how it is started.
      topics: by title, the flags of each topic, as pairs of syntax and description.
      about: what the command does.
      arguments: what follows the flags, such as "-- COMMAND".
      width: of the text, in characters.
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
