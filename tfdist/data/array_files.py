"""Data sets in CSV and NPZ files."""

from collections.abc import Mapping, Sequence

import numpy as np

from tfdist.config.data_set_files import find_path
from tfdist.data.csv_table import (
    Table,
    class_names,
    class_numbers,
    column_encoding,
    is_numeric,
    numbers,
    read_table,
)
from tfdist.data.examples import DataSet, Origins, Transform, identity
from tfdist.data.images import scale_to_unit
from tfdist.data.source import ArraySource, split_indices
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
    """A table; x is float32 [features]: columns of numbers, and columns of text as one-hot vectors, in order.

    The label is a class, numbered in the sorted order of the values, or a float32 number with `regression`.
    Categories, classes and means are computed from the training part.

    Args:
      path: the file, in UTF-8; may be compressed (.gz).
      label: column of the label, by name or number, counted from 0 or, if negative, from the end.
      test: a file with the same columns for the test part.
      validation_split: fraction of the rows, in [0, 1), that becomes the test part; the same in every run.
      drop: columns to leave out, by name or number.
      regression: whether the label is a number to predict.
      standardize: whether each column of numbers gets mean 0 and standard deviation 1.
      drop_missing: whether rows without a value are skipped; otherwise they are errors.
      delimiter: character between values.
      header: whether the first line has the names of the columns; otherwise their names are their indices.
      data_dir: directory that relative paths start from.

    Raises:
      InputError: a file is missing or is not such a table, or a column does not exist.
    """
    table = read_table(find_path(_KIND, path, data_dir), delimiter, header)
    if label is None:
        raise InputError(
            f"The data set {_KIND} needs the column of the label. Received: {_KIND}:{path} without label. Add label=..., "
            f"one of {', '.join(map(repr, table.columns))}."
        )
    target = table.column(label, "label")
    dropped_columns = {table.column(name, "drop") for name in ((drop,) if isinstance(drop, str | int) else drop)}
    names = [name for name in table.columns if name != target and name not in dropped_columns]
    if not names or target in dropped_columns:
        raise InputError(f"A table needs a label and other columns. Received: drop={drop!r} and label={label!r}.")
    if drop_missing:
        table = table.without_missing([*names, target])
    classes = None if regression else _classes(table, target)
    y = _labels(table, target, classes)
    train_rows, test_rows = split_indices(y if classes else np.zeros(len(y), np.int32), validation_split, test)
    train, test_table, test_labels = table.select(train_rows), table.select(test_rows), y[test_rows]
    encoding = column_encoding(train, names, standardize)
    source = TableRows(encoding.encode(train), y[train_rows], train.lines)
    if test:
        test_table = read_table(find_path(_KIND, test, data_dir), delimiter, header)
        test_table.column(target, "label")
        if drop_missing:
            test_table = test_table.without_missing([*names, target])
        test_labels = _labels(test_table, target, classes)
    test_source = TableRows(encoding.encode(test_table), test_labels, test_table.lines) if test_table.lines else None
    shape = tuple(source.element_spec[0].shape)
    return DataSet(f"{_KIND}:{path}", source, test_source, shape, len(classes) if classes else None, classes or ())


class TableRows(ArraySource):
    """Rows of a table in memory."""

    def __init__(self, x: np.ndarray, y: np.ndarray, lines: Sequence[int]):
        """Initializes with features, labels, and the line of the file that each row is on."""
        super().__init__((x, y))
        self._lines = lines

    @property
    def origins(self) -> Origins:
        return Origins("line", self._lines)


def _classes(table: Table, target: str) -> tuple[str, ...]:
    if is_numeric(table, target) and (numbers(table, target) % 1).any():
        raise InputError(
            f"The label of a class must be an integer or text. Received: fractions in column {target!r} of {table.path}. "
            "For numbers to predict, add regression=True."
        )
    return class_names(_label_texts(table, target), f"column {target!r} of {table.path}")


def _labels(table: Table, target: str, classes: tuple[str, ...] | None) -> np.ndarray:
    if classes is None:
        return numbers(table, target).astype(np.float32)
    return class_numbers(classes, _label_texts(table, target), f"column {target!r} of {table.path}")


def _label_texts(table: Table, target: str) -> list[str]:
    """Returns labels as text; 1.0 becomes 1."""
    if is_numeric(table, target):
        return [str(int(number)) if number % 1 == 0 else str(number) for number in numbers(table, target)]
    return table.columns[target]


_TRAIN = (("x_train", "y_train"), ("x", "y"))
_TEST = (("x_test", "y_test"), ("x_val", "y_val"))
_RULE = "An .npz file must have arrays x and y, or x_train and y_train and optionally x_test and y_test"


def npz(path: str, validation_split: float = 0.0, data_dir: str | None = None) -> DataSet:
    """Arrays `x` and `y`, or `x_train`, `y_train`, `x_test` and `y_test`, as in the files of `keras.datasets`.

    uint8 is scaled to float32 in [0, 1]; gray images [n, height, width] get a channel dim. Other numbers are converted to
    float32. Integer and text labels are classes; y of shape [n, 1] becomes [n].

    Args:
      path: the file.
      validation_split: fraction of the examples, in [0, 1), that becomes the test part; the same in every run.
      data_dir: directory that a relative path starts from.

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
        names = class_names(y.tolist(), file)
        y = class_numbers(names, y.tolist(), file)
        test = None if test is None else (test[0], class_numbers(names, test[1].reshape(-1).tolist(), file))
    labels, test_name = y if _is_label(y) else np.zeros(len(y), np.int32), file if test else None
    train_indices, test_indices = split_indices(labels, validation_split, test_name)
    if test is None:
        test = (x[test_indices], y[test_indices]) if len(test_indices) else None
    else:
        test = _model_arrays(*test, file)
        if test[0].shape[1:] != x.shape[1:]:
            raise InputError(
                f"Test examples must have the shape of the training examples. Received: {file} with x of "
                f"{list(x.shape[1:])} and test x of {list(test[0].shape[1:])}."
            )
    source = _array_source((x[train_indices], y[train_indices]) if len(test_indices) else (x, y))
    shape, classes = tuple(source.element_spec[0].shape), len(names) or (int(y.max()) + 1 if _is_label(y) else None)
    test_source = None if test is None else _array_source(test)
    return DataSet(f"npz:{path}", source, test_source, shape, classes, names)


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
            f"Arrays must have the same first dim, at least 1. Received: {file} with x of {list(x.shape)} and y of "
            f"{list(y.shape)}."
        )
    if x.dtype.kind not in "iufb" or y.dtype.kind not in "iufbU":
        raise InputError(
            f"x must be numbers, and y numbers or text. Received: {file} with x of {x.dtype} and y of {y.dtype}."
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
