"""Reads a CSV file into columns of text."""

import collections
import csv
import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TextIO

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer
from tfdist.grammar.spec import nearest

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))  # a cell without a value, in lower case


class Table(NamedTuple):
    """A table.

    Attributes:
      path: its file.
      columns: the cells of each column, by its name, in order.
      lines: line of the file that each row is on, from 1.
    """

    path: str
    columns: dict[str, list[str]]
    lines: list[int]

    def column(self, name: str | int, what: str) -> str:
        """Returns the name of a column, given its name or, counted from 0 or from the end, its number.

        Args:
          name: name or number.
          what: what needs it, for the error.

        Raises:
          InputError: there is no such column.
        """
        if is_integer(name) and -len(self.columns) <= int(name) < len(self.columns):
            return list(self.columns)[int(name)]
        if str(name) in self.columns:
            return str(name)
        names = list(self.columns)
        raise InputError(f"{what} must be a column of {self.path}. Received: {name!r}.{nearest(str(name), names[:30])}")

    def without_missing(self, names: Sequence[str]) -> "Table":
        """Returns the rows that have a value in each of some columns."""
        kept = [all(self.columns[name][row].lower() not in MISSING for name in names) for row in range(len(self.lines))]
        columns = {name: list(itertools.compress(cells, kept)) for name, cells in self.columns.items()}
        return Table(self.path, columns, list(itertools.compress(self.lines, kept)))


def read_table(path: str, delimiter: str, header: bool) -> Table:
    """Reads a file, which is in UTF-8 and, if its name ends in .gz, compressed.

    Args:
      path: the file.
      delimiter: character between cells.
      header: whether the first line has the names of the columns; otherwise they are numbers from 0.

    Raises:
      InputError: the file is not such a table; names the line.
    """
    if not (isinstance(delimiter, str) and len(delimiter) == 1 and delimiter not in '"\r\n'):
        raise InputError(f"delimiter must be one character. Received: {delimiter!r}.")
    try:
        with _opened(path) as file:
            return _table(path, _rows(path, file, delimiter), header)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise InputError(f"A CSV file must be readable UTF-8 text. Received: {path}: {error}.") from error


def _opened(path: str) -> TextIO:
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _rows(path: str, file: TextIO, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields line and cells of each row that is not empty; all rows have equally many cells."""
    reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
    width = 0
    for cells in reader:
        if not cells:
            continue
        width = width or len(cells)
        if len(cells) != width:
            raise InputError(
                f"Every row of a CSV file must have as many values as the first. Received: {path}, line "
                f"{reader.line_num}: {len(cells)} values instead of {width}. Check the quotes, or set delimiter."
            )
        yield reader.line_num, [cell.strip() for cell in cells]


def _table(path: str, rows: Iterator[tuple[int, list[str]]], header: bool) -> Table:
    first = next(rows, None)
    if first is None:
        raise InputError(f"A CSV file must have rows. Received: {path}, which is empty.")
    names = first[1] if header else [str(number) for number in range(len(first[1]))]
    if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise InputError(
            f"The first line must have different names of columns. Received: {path} with {twice[0]!r} twice. For a file "
            "without names, add header=False."
        )
    cells = list(rows) if header else [first, *rows]
    if not cells:
        raise InputError(f"A CSV file must have rows. Received: {path}, which has a line of names only.")
    columns = dict(zip(names, map(list, zip(*(row for _, row in cells), strict=True)), strict=True))
    return Table(path, columns, [line for line, _ in cells])
