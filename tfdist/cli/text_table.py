"""Tables of text."""

from collections.abc import Sequence


def text_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
