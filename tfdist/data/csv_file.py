"""Tables in CSV files: numbers and categories."""

from collections.abc import Sequence

import numpy as np

from tfdist.config.data_set_files import existing
from tfdist.data.csv_table import (
    Table,
    class_names,
    class_numbers,
    column_encoding,
    is_numeric,
    numbers,
    read_table,
)
from tfdist.data.examples import DataSet, Origins
from tfdist.data.source import ArraySource
from tfdist.data.split import split_indices
from tfdist.errors import InputError

_KIND = "csv"


def csv(
    path: str,
    label: str | int | None = None,
    test: str | None = None,
    validation_split: float = 0.0,
    drop: Sequence[str | int] | str = (),
    regression: bool = False,
    standardize: bool = False,
    drop_missing: bool = False,
    delimiter: str = ",",
    header: bool = True,
    data_dir: str | None = None,
) -> DataSet:
    """A table; x is float32 [features]: columns of numbers, and columns of text as one-hot vectors, in their order.

    The label is a class, numbered in sorted order of the different values, or with `regression` a float32 number.
    Everything that is learned from data (categories, classes, means) is learned from the training part.

    Args:
      path: the file, in UTF-8; may be compressed (.gz).
      label: column of the label, by name or number, counted from 0 or, if negative, from the end.
      test: a second file with the same columns, the test part.
      validation_split: fraction of the rows, in [0, 1), that becomes the test part; the same in every run.
      drop: columns to leave out, by name or number.
      regression: whether the label is a number to predict.
      standardize: whether each column of numbers gets mean 0 and standard deviation 1.
      drop_missing: whether rows that lack a value are left out; otherwise they are errors.
      delimiter: character between values.
      header: whether the first line has the names of the columns; otherwise they are numbers from 0.
      data_dir: folder in which relative paths are looked for.

    Raises:
      InputError: a file is missing or is no such table, or a column does not exist.
    """
    if test and validation_split:
        raise InputError(
            f"Give test or validation_split, not both. Received: test={test!r}, validation_split={validation_split}."
        )
    table = read_table(existing(_KIND, path, data_dir), delimiter, header)
    if label is None:
        raise InputError(
            f"The data set {_KIND} needs the column of the label. Received: {_KIND}:{path} without label. Add label=..., "
            f"one of {', '.join(map(repr, table.columns))}."
        )
    target = table.column(label, "label")
    dropped = {table.column(name, "drop") for name in ((drop,) if isinstance(drop, str | int) else drop)}
    names = [name for name in table.columns if name != target and name not in dropped]
    if not names or target in dropped:
        raise InputError(f"A table needs a label and other columns. Received: drop={drop!r} and label={label!r}.")
    table = _with_values(table, [*names, target], drop_missing)
    classes = None if regression else _classes(table, target)
    y = _labels(table, target, classes)
    train_rows, test_rows = split_indices(y if classes else np.zeros(len(y), np.int32), validation_split)
    train = _rows(table, train_rows) if len(test_rows) else table
    encoding = column_encoding(train, names, standardize)
    source, other = TableRows(encoding.encoded(train), y[train_rows], train.lines), None
    if len(test_rows):
        rest = _rows(table, test_rows)
        other = TableRows(encoding.encoded(rest), y[test_rows], rest.lines)
    if test:
        rest = read_table(existing(_KIND, test, data_dir), delimiter, header)
        rest.column(target, "label")
        rest = _with_values(rest, [*names, target], drop_missing)
        other = TableRows(encoding.encoded(rest), _labels(rest, target, classes), rest.lines)
    shape = tuple(source.element_spec[0].shape)
    return DataSet(f"{_KIND}:{path}", source, other, shape, len(classes) if classes else None, classes or ())


class TableRows(ArraySource):
    """Rows of a table in memory."""

    def __init__(self, x: np.ndarray, y: np.ndarray, lines: Sequence[int]):
        """Initializes with features, labels, and the line of the file that each row is on."""
        super().__init__((x, y))
        self._lines = lines

    @property
    def origins(self) -> Origins:
        """See base class."""
        return Origins("line", self._lines)


def _with_values(table: Table, names: Sequence[str], drop_missing: bool) -> Table:
    if not drop_missing:
        return table
    for name in names:
        table.column(name, "Each column of the training data")
    complete = table.without_missing(names)
    if not complete.lines:
        raise InputError(
            f"A row of {table.path} must have a value in each column. Received: none that has, with drop_missing."
        )
    return complete


def _classes(table: Table, target: str) -> tuple[str, ...]:
    if is_numeric(table, target) and (numbers(table, target) % 1).any():
        raise InputError(
            f"The label of a class must be an integer or text. Received: fractions in column {target!r} of {table.path}. "
            "For numbers to predict, add regression=True."
        )
    return class_names(_texts(table, target), f"column {target!r} of {table.path}")


def _labels(table: Table, target: str, classes: tuple[str, ...] | None) -> np.ndarray:
    if classes is None:
        return numbers(table, target).astype(np.float32)
    return class_numbers(classes, _texts(table, target), f"column {target!r} of {table.path}")


def _texts(table: Table, target: str) -> list[str]:
    """Returns labels as text, in which 1.0 is 1."""
    if is_numeric(table, target):
        return [str(int(number)) if number % 1 == 0 else str(number) for number in numbers(table, target)]
    return table.columns[target]


def _rows(table: Table, indices: np.ndarray) -> Table:
    columns = {name: [cells[row] for row in indices] for name, cells in table.columns.items()}
    return Table(table.path, columns, [table.lines[row] for row in indices])
