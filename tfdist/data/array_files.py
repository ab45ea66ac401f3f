"""Loads the datasets `csv` and `npz`, in CSV and NPZ files."""

import collections
import csv as csv_reader
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TextIO

import numpy as np

from tfdist.config.dataset_files import find_path
from tfdist.data.examples import DatasetSplits, Origins, Transform, identity
from tfdist.data.images import scale_to_unit
from tfdist.data.source import ArraySource, split_indices
from tfdist.errors import InputError, is_integer, nearest

MISSING_VALUES = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))  # in lower case


class Table(NamedTuple):
    """The cells of a CSV file."""

    path: str  # path of the file
    columns: dict[str, list[str]]  # cells of each column by name, in the order of the file
    line_numbers: list[int]  # line number of each row in the file, from 1

    def column(self, name: str | int, purpose: str) -> str:
        """Returns the name of a column, given its name or index; if it is missing, raises `InputError` with `purpose`."""
        if is_integer(name) and -len(self.columns) <= int(name) < len(self.columns):
            return list(self.columns)[int(name)]
        if str(name) in self.columns:
            return str(name)
        names = list(self.columns)
        raise InputError(
            f"{purpose} must be a column of {self.path}. Received: {name!r}.{nearest(str(name), names[:30])}"
        )

    def select(self, rows: Sequence[int] | np.ndarray) -> "Table":
        """Returns a table of the given rows."""
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        return Table(self.path, columns, [self.line_numbers[row] for row in rows])

    def without_missing(self, names: Sequence[str]) -> "Table":
        """Returns a table of the rows with a value in each of the given columns; raises `InputError` if there are none."""
        columns = [self.column(name, "Each column of the training data") for name in names]
        cells = zip(*(self.columns[name] for name in columns), strict=True)
        rows = [row for row, values in enumerate(cells) if not any(value.lower() in MISSING_VALUES for value in values)]
        if not rows:
            raise InputError(
                f"With drop_missing, a row of {self.path} must have a value in each column. Received no such row."
            )
        return self.select(rows)


def read_table(path: str, delimiter: str, header: bool) -> Table:
    """Reads a file in UTF-8, compressed if its name ends in .gz; see `csv` for the arguments and errors."""
    if not (isinstance(delimiter, str) and len(delimiter) == 1 and delimiter not in '"\r\n'):
        raise InputError(f"delimiter must be one character. Received: {delimiter!r}.")
    try:
        with _open(path) as file:
            return _make_table(path, _read_rows(path, file, delimiter), header)
    except (OSError, EOFError, UnicodeDecodeError, csv_reader.Error, zlib.error) as error:
        raise InputError(f"A CSV file must be readable UTF-8 text. Received: {path}: {error}.") from error


def _open(path: str) -> TextIO:
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _read_rows(path: str, file: TextIO, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and the cells of each nonempty row; all rows have the same number of cells."""
    reader = csv_reader.reader(file, delimiter=delimiter, skipinitialspace=True)
    width = 0
    for cells in reader:
        if not cells:
            continue
        width = width or len(cells)
        if len(cells) != width:
            raise InputError(
                f"Every row of a CSV file must have as many values as the first row. Received: {path}, line "
                f"{reader.line_num}: {len(cells)} values instead of {width}. Check the quotes, or set delimiter."
            )
        yield reader.line_num, [cell.strip() for cell in cells]


def _make_table(path: str, rows: Iterator[tuple[int, list[str]]], header: bool) -> Table:
    first_row = next(rows, None)
    if first_row is None:
        raise InputError(f"A CSV file must have rows. Received: {path}, which is empty.")
    names = first_row[1] if header else [str(index) for index in range(len(first_row[1]))]
    if duplicates := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise InputError(
            f"The column names in the first line must be unique. Received: {path}, with {duplicates[0]!r} twice. For a "
            "file without column names, add header=False."
        )
    cells = list(rows) if header else [first_row, *rows]
    if not cells:
        raise InputError(f"A CSV file must have rows. Received: {path}, which has only a line of column names.")
    columns = dict(zip(names, map(list, zip(*(row for _, row in cells), strict=True)), strict=True))
    return Table(path, columns, [line for line, _ in cells])


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
) -> DatasetSplits:
    """Loads a table. x is float32 [features]: numeric columns, and text columns as one-hot vectors, in the file's order.

    The label is a class, the index of its value in sorted order; with `regression`, it is a float32 number.
    Categories, classes and means are computed from the training rows.

    Args:
      path: the file, in UTF-8; may be compressed (.gz).
      label: column of the label, by name or index; a negative index counts from the end.
      test: a file with the same columns, used as the test data.
      validation_split: fraction of the rows, in [0, 1), to use as the test data; the same rows in every run.
      drop: columns to exclude, by name or index.
      regression: whether the label is a number to predict.
      standardize: whether to scale each numeric column to mean 0 and standard deviation 1.
      drop_missing: whether to skip rows with a missing value; otherwise they are errors.
      delimiter: character between values.
      header: whether the first line contains the column names; otherwise columns are named by their indices.
      data_dir: directory against which relative paths are resolved.

    Raises:
      InputError: a file is missing or is not such a table, or a column does not exist.
    """
    table = read_table(find_path(_KIND, path, data_dir), delimiter, header)
    if label is None:
        raise InputError(
            f"The dataset {_KIND} needs the column of the label. Received: {_KIND}:{path}, without label. Add label=..., "
            f"one of {', '.join(map(repr, table.columns))}."
        )
    target = table.column(label, "label")
    dropped_columns = {table.column(name, "drop") for name in ((drop,) if isinstance(drop, str | int) else drop)}
    names = [name for name in table.columns if name != target and name not in dropped_columns]
    if not names or target in dropped_columns:
        raise InputError(
            f"A table needs a label and at least one other column. Received: drop={drop!r} and label={label!r}."
        )
    if drop_missing:
        table = table.without_missing([*names, target])
    classes = None if regression else _classes(table, target)
    y = _labels(table, target, classes)
    train_rows, test_rows = split_indices(y if classes else np.zeros(len(y), np.int32), validation_split, test)
    train, test_table, test_labels = table.select(train_rows), table.select(test_rows), y[test_rows]
    encode = _column_encoder(train, names, standardize)
    source = _table_rows(encode(train), y[train_rows], train.line_numbers)
    if test:
        test_table = read_table(find_path(_KIND, test, data_dir), delimiter, header)
        test_table.column(target, "label")
        if drop_missing:
            test_table = test_table.without_missing([*names, target])
        test_labels = _labels(test_table, target, classes)
    test_source = (
        _table_rows(encode(test_table), test_labels, test_table.line_numbers) if test_table.line_numbers else None
    )
    shape = tuple(source.element_spec[0].shape)
    return DatasetSplits(
        f"{_KIND}:{path}", source, test_source, shape, len(classes) if classes else None, classes or ()
    )


def _table_rows(x: np.ndarray, y: np.ndarray, line_numbers: Sequence[int]) -> ArraySource:
    source = ArraySource((x, y))
    source.origins = Origins("line", line_numbers)
    return source


def _classes(table: Table, target: str) -> tuple[str, ...]:
    if is_numeric(table, target) and (numeric_column(table, target) % 1).any():
        raise InputError(
            f"Class labels must be integers or text. Received: fractions in column {target!r} of {table.path}. To predict "
            "numbers, add regression=True."
        )
    return class_names(_label_texts(table, target))


def _labels(table: Table, target: str, classes: tuple[str, ...] | None) -> np.ndarray:
    if classes is None:
        return numeric_column(table, target).astype(np.float32)
    return class_indices(classes, _label_texts(table, target), f"column {target!r} of {table.path}")


def _label_texts(table: Table, target: str) -> list[str]:
    """Returns labels as text; an integral number such as 1.0 becomes "1"."""
    if is_numeric(table, target):
        return [str(int(number)) if number % 1 == 0 else str(number) for number in numeric_column(table, target)]
    return table.columns[target]


_MAX_CATEGORIES = 100  # a column with more distinct values probably contains identifiers or prose


def _column_encoder(table: Table, names: Sequence[str], standardize: bool) -> Callable[[Table], np.ndarray]:
    """Returns a function that encodes columns of a table as float32 [rows, features]; an unknown category becomes zeros.

    Categories, means and standard deviations are computed from the training rows, `table`.

    Raises:
      InputError: a column has too many distinct strings. The function raises it if a column or a number is missing.
    """
    categories = {name: _categories(table, name) for name in names}

    def features(table: Table) -> np.ndarray:
        parts = []
        for name, texts in categories.items():
            cells = table.columns[table.column(name, "Each column of the training data")]
            one_hot = None if texts is None else np.array(cells)[:, None] == np.array(texts)
            parts.append(numeric_column(table, name)[:, None] if one_hot is None else one_hot.astype(np.float64))
        return np.concatenate(parts, axis=1)

    mean, scale = np.zeros(()), np.ones(())
    if standardize:
        x = features(table)
        is_numeric = np.concatenate([np.full(len(texts or ["number"]), texts is None) for texts in categories.values()])
        deviation = np.where(is_numeric, x.std(axis=0), 1.0)
        mean, scale = np.where(is_numeric, x.mean(axis=0), 0.0), np.where(deviation > 0, deviation, 1.0)
    return lambda table: ((features(table) - mean) / scale).astype(np.float32)


def numeric_column(table: Table, name: str) -> np.ndarray:
    """Returns a numeric column, float64 [rows]; raises `InputError`, with the line, for a cell that is not finite."""
    cells = table.columns[name]
    values = _parse_numbers(cells)
    invalid = np.flatnonzero(~np.isfinite(values))
    if len(invalid):
        cell, line = cells[invalid[0]], table.line_numbers[invalid[0]]
        received = "a missing value" if cell.lower() in MISSING_VALUES else f"{cell!r}"
        raise InputError(
            f"Every row must have a number in a numeric column. Received: {received} in column {name!r}, line {line} of "
            f"{table.path}. Fill it in, skip such rows (drop_missing=True), or exclude the column (drop)."
        )
    return values


def is_numeric(table: Table, name: str) -> bool:
    """Returns whether a column has values, all of which are numbers or missing."""
    present_cells = [cell for cell in table.columns[name] if cell.lower() not in MISSING_VALUES]
    return bool(present_cells) and not bool(np.isnan(_parse_numbers(present_cells)).any())


def _parse_numbers(cells: Sequence[str]) -> np.ndarray:
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
            f"A text column must have at most {_MAX_CATEGORIES} distinct values. Received: {len(texts)} in column "
            f"{name!r} of {table.path}. The first that is not a number is {cells[first_row]!r}, in line "
            f"{table.line_numbers[first_row]}. Exclude the column with drop=({name!r},)."
        )
    return texts


def class_names(labels: Iterable[str]) -> tuple[str, ...]:
    """Returns the distinct labels, sorted numerically if all are integers, otherwise alphabetically."""
    try:
        return tuple(sorted(set(labels), key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(set(labels)))


def class_indices(names: Sequence[str], labels: Iterable[str], origin: str) -> np.ndarray:
    """Returns the index of each label in `names`, int32 [n]; raises `InputError` for an unknown label in `origin`."""
    index_by_name = {name: index for index, name in enumerate(names)}
    try:
        return np.array([index_by_name[label] for label in labels], np.int32)
    except KeyError as error:
        label = error.args[0]
        raise InputError(
            f"Every label must occur in the training data. Received: {label!r} in {origin}.{nearest(str(label), names[:20])}"
        ) from error


_TRAIN = (("x_train", "y_train"), ("x", "y"))
_TEST = (("x_test", "y_test"), ("x_val", "y_val"))
_RULE = "An .npz file must have arrays x and y, or x_train and y_train and optionally x_test and y_test"


def npz(path: str, validation_split: float = 0.0, data_dir: str | None = None) -> DatasetSplits:
    """Loads arrays `x` and `y`, or `x_train`, `y_train`, `x_test` and `y_test`, as in the files of `keras.datasets`.

    uint8 arrays are scaled to float32 in [0, 1]; gray images [n, height, width] get a channel dim. Other numbers are
    converted to float32. Integer and text labels are classes; y of shape [n, 1] becomes [n].

    Args:
      path: the file.
      validation_split: fraction of the examples, in [0, 1), to use as the test data; the same examples in every run.
      data_dir: directory against which a relative path is resolved.

    Raises:
      InputError: the file is missing or is not an archive of such arrays.
    """
    file = find_path("npz", path, data_dir)
    arrays = _load_arrays(file)
    train, test = _find_pair(_TRAIN, arrays, file), _find_pair(_TEST, arrays, file)
    if train is None:
        raise InputError(f"{_RULE}. Received: {file} with {', '.join(arrays) or 'no arrays'}.")
    x, y = _model_arrays(*train, file)
    names: tuple[str, ...] = ()
    if y.dtype.kind == "U":
        names = class_names(y.tolist())
        y = class_indices(names, y.tolist(), file)
        test = None if test is None else (test[0], class_indices(names, test[1].reshape(-1).tolist(), file))
    labels, test_name = y if _is_label(y) else np.zeros(len(y), np.int32), file if test else None
    train_indices, test_indices = split_indices(labels, validation_split, test_name)
    if test is None:
        test = (x[test_indices], y[test_indices]) if len(test_indices) else None
    else:
        test = _model_arrays(*test, file)
        if test[0].shape[1:] != x.shape[1:]:
            raise InputError(
                f"Test examples must have the shape of the training examples. Received: {file}, with training examples of "
                f"shape {list(x.shape[1:])} and test examples of shape {list(test[0].shape[1:])}."
            )
    source = _array_source((x[train_indices], y[train_indices]) if len(test_indices) else (x, y))
    shape, classes = tuple(source.element_spec[0].shape), len(names) or (int(y.max()) + 1 if _is_label(y) else None)
    return DatasetSplits(f"npz:{path}", source, None if test is None else _array_source(test), shape, classes, names)


def _load_arrays(file: str) -> dict[str, np.ndarray]:
    try:
        with open(file, "rb") as content:  # np.load(path) would leave the file open after an error
            archive = np.load(content, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array")
            names = [name for pair in (*_TRAIN, *_TEST) for name in pair if name in archive]
            return {name: archive[name] for name in names or archive}
    except Exception as error:  # damaged files raise many types, such as MemoryError for a wrong shape
        cause = "it is not an archive, or has Python objects" if "pickle" in str(error) else str(error).rstrip(".")
        raise InputError(f"{_RULE}. Received: {file}, which cannot be read: {cause}.") from error


def _find_pair(
    candidates: Sequence[tuple[str, str]], arrays: Mapping[str, np.ndarray], file: str
) -> tuple[np.ndarray, np.ndarray] | None:
    pair = next(((x, y) for x, y in candidates if x in arrays or y in arrays), None)
    if pair is None:
        return None
    if missing := [name for name in pair if name not in arrays]:
        raise InputError(f"{_RULE}. Received: {file} with {', '.join(arrays)} but without {missing[0]}.")
    return arrays[pair[0]], arrays[pair[1]]


def _model_arrays(x: np.ndarray, y: np.ndarray, file: str) -> tuple[np.ndarray, np.ndarray]:
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y) or not len(x):
        raise InputError(
            f"Arrays must have the same first dim, at least 1. Received: {file}, with x of shape {list(x.shape)} and y of "
            f"shape {list(y.shape)}."
        )
    if x.dtype.kind not in "iufb" or y.dtype.kind not in "iufbU":
        raise InputError(
            f"x must be numeric, and y numeric or text. Received: {file}, with x of dtype {x.dtype} and y of dtype {y.dtype}."
        )
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[..., None]
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    y = y.astype(np.int32) if y.dtype.kind in "iub" else y.astype(np.float32) if y.dtype.kind == "f" else y
    if _is_label(y) and y.min() < 0:
        raise InputError(f"Integer labels must be at least 0. Received: {int(y.min())} in {file}.")
    return x if x.dtype == np.uint8 else x.astype(np.float32), y


def _is_label(y: np.ndarray) -> bool:
    return y.dtype.kind == "i" and y.ndim == 1


def _array_source(arrays: tuple[np.ndarray, np.ndarray]) -> ArraySource:
    transform: Transform = scale_to_unit(255) if arrays[0].dtype == np.uint8 else identity
    return ArraySource(arrays, transform)
