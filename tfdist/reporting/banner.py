"""The description of a run at its start, as aligned lines."""

import textwrap
from collections.abc import Mapping

_WIDTH = 76  # of 80, as a launcher adds the rank


def banner(description: Mapping[str, str]) -> list[str]:
    """Returns a description as lines of at most 76 columns, unless a word, such as a path, is longer.

    Args:
      description: texts by name; empty texts are left out.
    """
    rows = {name: text for name, text in description.items() if text}
    indent = max(map(len, rows), default=0) + 2
    lines = []
    for name, text in rows.items():
        clean = "".join(character if character.isprintable() else " " for character in text)
        lines += textwrap.wrap(
            clean,
            _WIDTH,
            initial_indent=name.ljust(indent),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines
