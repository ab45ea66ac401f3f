"""Encodes the columns of a table as numbers, as learned from the training part."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdist.data.formats.csv_table import MISSING, Table
from tfdist.errors import InputError

_MOST_CATEGORIES = 100  # more would rather be identifiers or text


@dataclasses.dataclass(frozen=True)
class ColumnEncoding:
    """The encoding of the columns of x: numbers as they are or standardized, texts as one-hot vectors.

    Attributes:
      categories: of each column, in order, its different texts, sorted; None for a column of numbers.
      mean: what is subtracted from each number, float64 [features].
      scale: what it is then divided by, float64 [features].
    """

    categories: dict[str, tuple[str, ...] | None]
    mean: np.ndarray
    scale: np.ndarray

    def encoded(self, table: Table) -> np.ndarray:
        """Returns the rows of a table, float32 [rows, features]; a text that training data lacks is a vector of zeros.

        Raises:
          InputError: a column is missing, or a cell of a column of numbers is not one.
        """
        return ((_features(table, self.categories) - self.mean) / self.scale).astype(np.float32)


def column_encoding(table: Table, names: Sequence[str], standardize: bool) -> ColumnEncoding:
    """Returns the encoding of some columns of the training part.

    Args:
      table: training rows.
      names: the columns.
      standardize: whether each column of numbers gets mean 0 and standard deviation 1.

    Raises:
      InputError: a cell has no value, or a column has too many different texts.
    """
    categories = {name: _categories(table, name) for name in names}
    x = _features(table, categories)
    width, mean, scale = x.shape[1], np.zeros(x.shape[1]), np.ones(x.shape[1])
    if standardize:
        numeric = np.concatenate([np.full(len(known or ["number"]), known is None) for known in categories.values()])
        deviation = np.where(numeric, x.std(axis=0), 1.0)
        mean, scale = np.where(numeric, x.mean(axis=0), mean), np.where(deviation > 0, deviation, 1.0)
    assert mean.shape == scale.shape == (width,)
    return ColumnEncoding(categories, mean, scale)


def numbers(table: Table, name: str) -> np.ndarray:
    """Returns a column of numbers, float64 [rows].

    Raises:
      InputError: a cell is not a finite number; names the line.
    """
    cells = table.columns[name]
    try:
        found = np.array(cells, np.float64)
    except ValueError:
        found = np.array([_number(cell) for cell in cells], np.float64)
    wrong = np.flatnonzero(~np.isfinite(found))
    if len(wrong):
        cell, line = cells[wrong[0]], table.lines[wrong[0]]
        what = "no value" if cell.lower() in MISSING else f"{cell!r}"
        raise InputError(
            f"Every row must have a number in a column of numbers. Received: {what} in column {name!r}, line {line} of "
            f"{table.path}. Fill it in, or leave out such rows (drop_missing=True) or the column (drop)."
        )
    return found


def is_numeric(table: Table, name: str) -> bool:
    """Returns whether all values of a column that are not missing are numbers."""
    cells = table.columns[name]
    try:
        np.array(cells, np.float64)
    except ValueError:
        present = [cell for cell in cells if cell.lower() not in MISSING]
        return bool(present) and all(np.isfinite(_number(cell)) for cell in present)
    return True


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _categories(table: Table, name: str) -> tuple[str, ...] | None:
    if is_numeric(table, name):
        return None
    found = tuple(sorted(set(table.columns[name])))
    if len(found) > _MOST_CATEGORIES:
        cells = table.columns[name]
        first = next(row for row, cell in enumerate(cells) if not np.isfinite(_number(cell)))
        raise InputError(
            f"A column of text must have at most {_MOST_CATEGORIES} different values. Received: {len(found)} in column "
            f"{name!r} of {table.path}; the first that is not a number is {cells[first]!r}, in line {table.lines[first]}. "
            f"Leave the column out with drop=({name!r},)."
        )
    return found


def _features(table: Table, categories: dict[str, tuple[str, ...] | None]) -> np.ndarray:
    parts = []
    for name, known in categories.items():
        table.column(name, "Each column of the training data")
        parts.append(numbers(table, name)[:, None] if known is None else _one_hot(table.columns[name], known))
    return np.concatenate(parts, axis=1)


def _one_hot(cells: Sequence[str], known: Sequence[str]) -> np.ndarray:
    place = {text: number for number, text in enumerate(known)}
    places = np.array([place.get(cell, -1) for cell in cells])
    return (places[:, None] == np.arange(len(known))).astype(np.float64)
