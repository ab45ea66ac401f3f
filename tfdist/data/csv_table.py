"""Reads CSV files, and encodes their columns and labels as numbers."""

import collections
import csv
import dataclasses
import gzip
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TextIO

import numpy as np

from tfdist.errors import InputError, is_integer, nearest

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))  # a cell without a value, in lower case


class Table(NamedTuple):
    """The cells of a CSV file.

    Attributes:
      path: path of the file.
      columns: the cells of each column, by name, in order.
      lines: line number of each row in the file, from 1.
    """

    path: str
    columns: dict[str, list[str]]
    lines: list[int]

    def column(self, name: str | int, purpose: str) -> str:
        """Returns the name of a column, given its name or its index, which may be negative.

        Args:
          name: name or index.
          purpose: the use of the column, for the error.

        Raises:
          InputError: there is no such column.
        """
        if is_integer(name) and -len(self.columns) <= int(name) < len(self.columns):
            return list(self.columns)[int(name)]
        if str(name) in self.columns:
            return str(name)
        names = list(self.columns)
        raise InputError(
            f"{purpose} must be a column of {self.path}. Received: {name!r}.{nearest(str(name), names[:30])}"
        )

    def select(self, rows: Sequence[int] | np.ndarray) -> "Table":
        """Returns some of the rows."""
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        return Table(self.path, columns, [self.lines[row] for row in rows])

    def without_missing(self, names: Sequence[str]) -> "Table":
        """Returns the rows that have a value in each of the given columns.

        Raises:
          InputError: there are none, or a column is missing.
        """
        cells = zip(
            *(self.columns[self.column(name, "Each column of the training data")] for name in names), strict=True
        )
        rows = [row for row, values in enumerate(cells) if not any(value.lower() in MISSING for value in values)]
        if not rows:
            raise InputError(
                f"A row of {self.path} must have a value in each column. Received: none, with drop_missing."
            )
        return self.select(rows)


def read_table(path: str, delimiter: str, header: bool) -> Table:
    """Reads a file in UTF-8, compressed if its name ends in .gz.

    Args:
      path: the file.
      delimiter: character between cells.
      header: whether the first line has the names of the columns; otherwise their names are their indices.

    Raises:
      InputError: the file is not such a table; the message names the line.
    """
    if not (isinstance(delimiter, str) and len(delimiter) == 1 and delimiter not in '"\r\n'):
        raise InputError(f"delimiter must be one character. Received: {delimiter!r}.")
    try:
        with _open(path) as file:
            return _make_table(path, _read_rows(path, file, delimiter), header)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise InputError(f"A CSV file must be readable UTF-8 text. Received: {path}: {error}.") from error


def _open(path: str) -> TextIO:
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _read_rows(path: str, file: TextIO, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and the cells of each nonempty row; all rows have the same number of cells."""
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


def _make_table(path: str, rows: Iterator[tuple[int, list[str]]], header: bool) -> Table:
    first_row = next(rows, None)
    if first_row is None:
        raise InputError(f"A CSV file must have rows. Received: {path}, which is empty.")
    names = first_row[1] if header else [str(number) for number in range(len(first_row[1]))]
    if duplicates := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise InputError(
            f"The first line must have different names of columns. Received: {path} with {duplicates[0]!r} twice. For a file "
            "without names, add header=False."
        )
    cells = list(rows) if header else [first_row, *rows]
    if not cells:
        raise InputError(f"A CSV file must have rows. Received: {path}, which has a line of names only.")
    columns = dict(zip(names, map(list, zip(*(row for _, row in cells), strict=True)), strict=True))
    return Table(path, columns, [line for line, _ in cells])


_MAX_CATEGORIES = 100  # a column with more values probably has identifiers or text


@dataclasses.dataclass(frozen=True)
class ColumnEncoding:
    """The encoding of the columns of x: numbers unchanged or standardized, strings as one-hot vectors.

    Attributes:
      categories: sorted distinct strings of each column; None for a column of numbers.
      mean: subtracted from each number, float64 [features].
      scale: divisor of each difference, float64 [features].
    """

    categories: dict[str, tuple[str, ...] | None]
    mean: np.ndarray
    scale: np.ndarray

    def encode(self, table: Table) -> np.ndarray:
        """Returns the rows of a table, float32 [rows, features]; a string without a category becomes zeros.

        Raises:
          InputError: a column is missing, or a cell of a numeric column is not a number.
        """
        return ((_features(table, self.categories) - self.mean) / self.scale).astype(np.float32)


def column_encoding(table: Table, names: Sequence[str], standardize: bool) -> ColumnEncoding:
    """Returns the encoding of columns of the training part.

    Args:
      table: training rows.
      names: the columns.
      standardize: whether each column of numbers gets mean 0 and standard deviation 1.

    Raises:
      InputError: a cell has no value, or a column has too many distinct strings.
    """
    categories = {name: _categories(table, name) for name in names}
    x = _features(table, categories)
    mean, scale = np.zeros(x.shape[1]), np.ones(x.shape[1])
    if standardize:
        numeric_mask = np.concatenate(
            [np.full(len(texts or ["number"]), texts is None) for texts in categories.values()]
        )
        deviation = np.where(numeric_mask, x.std(axis=0), 1.0)
        mean, scale = np.where(numeric_mask, x.mean(axis=0), mean), np.where(deviation > 0, deviation, 1.0)
    return ColumnEncoding(categories, mean, scale)


def numbers(table: Table, name: str) -> np.ndarray:
    """Returns a column of numbers, float64 [rows].

    Raises:
      InputError: a cell is not a finite number; the message names the line.
    """
    cells = table.columns[name]
    values = _parse_numbers(cells)
    invalid = np.flatnonzero(~np.isfinite(values))
    if len(invalid):
        cell, line = cells[invalid[0]], table.lines[invalid[0]]
        received = "no value" if cell.lower() in MISSING else f"{cell!r}"
        raise InputError(
            f"Every row must have a number in a column of numbers. Received: {received} in column {name!r}, line {line} of "
            f"{table.path}. Fill it in, or leave out such rows (drop_missing=True) or the column (drop)."
        )
    return values


def is_numeric(table: Table, name: str) -> bool:
    """Returns whether all values of a column that are not missing are numbers."""
    present_cells = [cell for cell in table.columns[name] if cell.lower() not in MISSING]
    return bool(present_cells) and not bool(np.isnan(_parse_numbers(present_cells)).any())


def _parse_numbers(cells: Sequence[str]) -> np.ndarray:
    """Returns cells as numbers, float64; NaN for others."""
    try:
        return np.array(cells, np.float64)
    except ValueError:
        return np.array([_parse_number(cell) for cell in cells], np.float64)


def _parse_number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _categories(table: Table, name: str) -> tuple[str, ...] | None:
    if is_numeric(table, name):
        return None
    texts = tuple(sorted(set(table.columns[name])))
    if len(texts) > _MAX_CATEGORIES:
        cells = table.columns[name]
        first_row = int(np.argmax(np.isnan(_parse_numbers(cells))))
        raise InputError(
            f"A column of text must have at most {_MAX_CATEGORIES} different values. Received: {len(texts)} in column "
            f"{name!r} of {table.path}; the first that is not a number is {cells[first_row]!r}, in "
            f"line {table.lines[first_row]}. Leave the column out with drop=({name!r},)."
        )
    return texts


def _features(table: Table, categories: dict[str, tuple[str, ...] | None]) -> np.ndarray:
    parts = []
    for name, texts in categories.items():
        table.column(name, "Each column of the training data")
        parts.append(numbers(table, name)[:, None] if texts is None else _one_hot(table.columns[name], texts))
    return np.concatenate(parts, axis=1)


def _one_hot(cells: Sequence[str], texts: Sequence[str]) -> np.ndarray:
    number_by_text = {text: number for number, text in enumerate(texts)}
    numbers = np.array([number_by_text.get(cell, -1) for cell in cells])
    return (numbers[:, None] == np.arange(len(texts))).astype(np.float64)


_MAX_CLASSES = 10_000  # more labels are probably not classes


def class_names(labels: Sequence[str], origin: str) -> tuple[str, ...]:
    """Returns the distinct labels as classes; numbers are sorted numerically, names alphabetically.

    Args:
      labels: label of each training example.
      origin: origin of the labels, for the error.

    Raises:
      InputError: there are too many classes.
    """
    unique_labels = set(labels)
    if len(unique_labels) > _MAX_CLASSES:
        raise InputError(
            f"A label must be one of at most {_MAX_CLASSES} classes. Received: {len(unique_labels)} different values in "
            f"{origin}. For numbers to predict, add regression=True."
        )
    try:
        return tuple(sorted(unique_labels, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(unique_labels))


def class_numbers(names: Sequence[str], labels: Sequence[str], origin: str) -> np.ndarray:
    """Returns the number of each label's class, int32 [n].

    Args:
      names: names of the classes, in the order of their numbers.
      labels: names of classes.
      origin: origin of the labels, for the error.

    Raises:
      InputError: a label is not the name of a class.
    """
    number_by_name = {name: number for number, name in enumerate(names)}
    for label in labels:
        if label not in number_by_name:
            raise InputError(
                f"Every label must occur in the training data. Received: {label!r} in {origin}."
                f"{nearest(str(label), names[:20])}"
            )
    return np.array([number_by_name[label] for label in labels], np.int32)
