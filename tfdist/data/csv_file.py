"""Tables in CSV files: numbers and categories."""

from collections.abc import Sequence

import numpy as np

from tfdist.config.data_set_files import existing
from tfdist.data.csv_table import (
    ClassLabels,
    ColumnEncoding,
    Table,
    class_labels,
    column_encoding,
    is_numeric,
    numbers,
    read_table,
)
from tfdist.data.examples import DataSet, Origins
from tfdist.data.source import ArraySource
from tfdist.data.split import held_out
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
    whole = read_table(existing(_KIND, path, data_dir), delimiter, header)
    if label is None:
        raise InputError(
            f"The data set {_KIND} needs the column of the label. Received: {_KIND}:{path} without label. Add label=..., "
            f"one of {', '.join(map(repr, whole.columns))}."
        )
    target = whole.column(label, "label")
    left_out = {whole.column(name, "drop") for name in ((drop,) if isinstance(drop, str | int) else drop)}
    names = [name for name in whole.columns if name != target and name not in left_out]
    if not names or target in left_out:
        raise InputError(f"A table needs a label and other columns. Received: drop={drop!r} and label={label!r}.")
    whole = _with_values(whole, [*names, target], drop_missing)
    classes = None if regression else _classes(whole, target)
    y = _labels(whole, target, classes)
    kept, held = held_out(y if classes else np.zeros(len(y), np.int32), validation_split)
    train = _rows(whole, kept) if len(held) else whole
    encoding = column_encoding(train, names, standardize)
    source, other = TableRows(encoding.encoded(train), y[kept], train.lines), None
    if len(held):
        rest = _rows(whole, held)
        other = TableRows(encoding.encoded(rest), y[held], rest.lines)
    if test:
        table = read_table(existing(_KIND, test, data_dir), delimiter, header)
        table.column(target, "label")
        other = _test_part(_with_values(table, [*names, target], drop_missing), target, encoding, classes)
    shape = tuple(source.element_spec[0].shape)
    return DataSet(
        f"{_KIND}:{path}",
        source,
        other,
        shape,
        len(classes.names) if classes else None,
        classes.names if classes else (),
    )


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


def _test_part(table: Table, target: str, encoding: ColumnEncoding, classes: ClassLabels | None) -> TableRows:
    return TableRows(encoding.encoded(table), _labels(table, target, classes), table.lines)


def _with_values(table: Table, names: Sequence[str], drop_missing: bool) -> Table:
    if not drop_missing:
        return table
    for name in names:
        table.column(name, "Each column of the training data")
    found = table.without_missing(names)
    if not found.lines:
        raise InputError(
            f"A row of {table.path} must have a value in each column. Received: none that has, with drop_missing."
        )
    return found


def _classes(table: Table, target: str) -> ClassLabels:
    if is_numeric(table, target) and (numbers(table, target) % 1).any():
        raise InputError(
            f"The label of a class must be an integer or text. Received: fractions in column {target!r} of {table.path}. "
            "For numbers to predict, add regression=True."
        )
    return class_labels(_texts(table, target), f"column {target!r} of {table.path}")


def _labels(table: Table, target: str, classes: ClassLabels | None) -> np.ndarray:
    if classes is None:
        return numbers(table, target).astype(np.float32)
    return classes.numbers(_texts(table, target), f"column {target!r} of {table.path}")


def _texts(table: Table, target: str) -> list[str]:
    """Returns labels as text, in which 1.0 is 1."""
    if is_numeric(table, target):
        found = numbers(table, target)
        return [str(int(number)) if number % 1 == 0 else str(number) for number in found]
    return table.columns[target]


def _rows(table: Table, indices: np.ndarray) -> Table:
    columns = {name: [cells[row] for row in indices] for name, cells in table.columns.items()}
    return Table(table.path, columns, [table.lines[row] for row in indices])
