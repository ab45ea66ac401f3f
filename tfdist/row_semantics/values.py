"""Defines abstract values of tensors: the label, the dims, known elements such as those of shapes, and list elements."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from tfdist.row_semantics.sizes import ONE, Size

# A label relates the values that replicas compute from their rows to the value that one device computes from all rows. Replica
# r has COUNT_r >= 1 rows of a batch of COUNT = sum of COUNT_r rows; t_r is the tensor of the replica, and t the tensor of one
# device. Labels include powers of COUNT, because code divides by the number of rows: a mean is a sum times COUNT^-1.

Reduction = Literal["sum", "max", "min", "all", "any"]


@dataclasses.dataclass(frozen=True)
class Replicated:
    """t_r = COUNT_r^power u and t = COUNT^power u, where u is equal on all replicas. The power of zeros is None."""

    power: int | None = 0

    def __str__(self) -> str:
        return "replicated" if not self.power else f"replicated*COUNT^{self.power}"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Along `axis`, t_r / COUNT_r^power are the rows of t / COUNT^power that belong to replica r."""

    axis: int
    size: Size  # of the axis, a multiple of COUNT: the elements of one row of the batch are contiguous
    power: int | None = 0  # None for zeros, which have any power

    def __str__(self) -> str:
        return f"rows({self.axis})" + (f"*COUNT^{self.power}" if self.power else "")


@dataclasses.dataclass(frozen=True)
class Partial:
    """t / COUNT^power is the reduction of all t_r / COUNT_r^power over replicas."""

    reduction: Reduction = "sum"
    power: int = 0

    def __str__(self) -> str:
        if self.reduction == "sum" and self.power == -1:
            return "mean"
        return self.reduction + (f"*COUNT^{self.power}" if self.power else "")


@dataclasses.dataclass(frozen=True)
class ReplicatedPlusSum:
    """A replicated value plus a sum over replicas times COUNT^power."""

    power: int
    variable: object = None  # the variable whose value is the replicated value; None for another value

    def __str__(self) -> str:
        return f"replicated + {Partial('sum', self.power)}"


@dataclasses.dataclass(frozen=True)
class AllRows:
    """The value depends on the rows of all replicas in any other way, or in an unknown way."""

    # The TensorFlow operation that caused the label; None if there is no such operation.
    cause: Any = dataclasses.field(default=None, compare=False)
    power: ClassVar[int] = 0

    def __str__(self) -> str:
        return "all rows"


Label = Replicated | Rows | Partial | ReplicatedPlusSum | AllRows

REPLICATED, ZEROS, SUM, MEAN, ALL_ROWS = Replicated(), Replicated(None), Partial(), Partial("sum", -1), AllRows()


def is_zero(label: Label) -> bool:
    """Returns whether all elements are known to be 0."""
    return label.power is None


def sum_power(label: Label) -> int | None:
    """Returns the power of COUNT with which a value is a sum over replicas; None if it is not a sum, or is zero.

    A replicated value is its own mean: COUNT_r^p u is a sum with the power p - 1.
    """
    if isinstance(label, Partial) and label.reduction == "sum":
        return label.power
    return label.power - 1 if isinstance(label, Replicated) and label.power is not None else None


def times_count(label: Label, power: int) -> Label:
    """Returns the label of a value times COUNT^power, where COUNT is the number of all rows on one device."""
    if isinstance(label, AllRows) or label.power is None:
        return label
    return dataclasses.replace(label, power=label.power + power)


def common_power(powers: Iterable[int | None]) -> tuple[bool, int | None]:
    """Returns whether all powers except those of zeros (None) are equal, and the common power."""
    distinct_powers = {power for power in powers if power is not None}
    return len(distinct_powers) <= 1, next(iter(distinct_powers), None)


def without_base(label: Label) -> Label:
    """Returns the label without the variable to which a sum was added, for a tensor with rearranged elements."""
    return dataclasses.replace(label, variable=None) if isinstance(label, ReplicatedPlusSum) else label


def join(labels: Sequence[Label]) -> Label:
    """Returns the label of a value whose elements are selected from several values, identically on all replicas."""
    if not labels:
        return ZEROS
    for label in labels:
        if isinstance(label, AllRows):
            return label
    distinct_labels = [label for label in dict.fromkeys(map(without_base, labels)) if label != ZEROS] or [ZEROS]
    if len(distinct_labels) == 1:
        return distinct_labels[0]
    rows = [label for label in distinct_labels if isinstance(label, Rows)]
    if rows:
        agrees, power = common_power(label.power for label in rows)
        if len(rows) < len(distinct_labels) or not agrees or len({(label.axis, label.size) for label in rows}) > 1:
            return ALL_ROWS
        return Rows(rows[0].axis, rows[0].size, power)
    powers = {sum_power(label) for label in distinct_labels}
    if None not in powers and len(powers) == 1:
        return Partial("sum", powers.pop())  # type: ignore[arg-type]
    others = [label for label in distinct_labels if label != REPLICATED]
    powers = {label.power if isinstance(label, ReplicatedPlusSum) else sum_power(label) for label in others}
    return ALL_ROWS if None in powers or len(powers) != 1 else ReplicatedPlusSum(powers.pop())  # type: ignore[arg-type]


def total(labels: Sequence[Label]) -> Label:
    """Returns the label of the sum of tensors that are not rows."""
    if any(isinstance(label, Partial) and label.reduction != "sum" for label in labels):
        return ALL_ROWS
    return join(labels)


Dims = tuple[Size | None, ...]


class NoRuleError(Exception):
    """The label of a result cannot be derived; the message is the reason."""


def require(condition: object, reason: str) -> None:
    """Raises `NoRuleError` with the reason if a condition of a rule is false."""
    if not condition:
        raise NoRuleError(reason)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """The abstract value of a tensor."""

    label: Label  # relation of the replicas' values to the value of all rows
    dims: Dims | None = None  # with None for unknown dims; None if the rank is unknown
    # Array of its elements as sizes, with None for unknown elements; None if there are too many, or none are known. The label
    # is `AllRows` if their powers of COUNT differ, as in a shape.
    numbers: np.ndarray | None = None
    element: "Value | None" = None  # for a list of tensors, the value of its elements
    variable: object = None  # for a resource or the unchanged value of a variable, the variable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        names = ("label", "dims", "variable", "element")
        are_equal = all(getattr(self, name) == getattr(other, name) for name in names)
        return are_equal and np.array_equal(self.numbers, other.numbers)  # type: ignore[arg-type]

    @property
    def known_label(self) -> Label:
        """The label, or `ALL_ROWS` if a dim is unknown, as when an unwritten element of a list is read."""
        is_unknown = self.dims is not None and None in self.dims and self.label != ALL_ROWS
        return ALL_ROWS if is_unknown else self.label

    @property
    def base(self) -> object:
        """The variable whose value this is, or to whose value this adds a sum; None if there is none."""
        return self.label.variable if isinstance(self.label, ReplicatedPlusSum) else self.variable

    @property
    def rank(self) -> int:
        """The number of axes. Raises `NoRuleError` if it is unknown."""
        return len(self.known_dims)

    @property
    def known_dims(self) -> Dims:
        """The dims. Raises `NoRuleError` if their number is unknown."""
        if self.dims is None:
            raise NoRuleError("the rank is unknown")
        return self.dims

    @property
    def is_replicated(self) -> bool:
        """Whether the tensor is equal on all replicas and on one device."""
        return isinstance(self.label, Replicated) and not self.label.power and self.element is None

    @property
    def rows(self) -> Rows:
        """The label, if it is `Rows`. Raises `NoRuleError` for other labels."""
        if not isinstance(self.label, Rows):
            raise NoRuleError("an input is not rows")
        return self.label

    @property
    def flat_numbers(self) -> Dims:
        """The elements, with None for unknown elements. Raises `NoRuleError` if `numbers` is None."""
        if self.numbers is None:
            raise NoRuleError("the elements are unknown")
        return tuple(self.numbers.flat)

    @property
    def known_numbers(self) -> list[Size]:
        """The elements. Raises `NoRuleError` if an element is unknown."""
        numbers = [number for number in self.flat_numbers if number is not None]
        require(len(numbers) == len(self.flat_numbers), "an element is unknown")
        return numbers

    @property
    def integers(self) -> list[int]:
        """The elements as integers. Raises `NoRuleError` if an element is not a known integer."""
        try:
            return [int(number) for number in self.known_numbers]
        except ValueError as error:
            raise NoRuleError(str(error)) from None


# An element of a list that a loop has not written yet: zeros, of any shape.
UNWRITTEN = Value(ZEROS)


def numeric_value(numbers: np.ndarray, dims: Dims | None = None) -> Value:
    """Returns the value of a tensor with these elements."""
    if any(number is None for number in numbers.flat):
        label: Label = ALL_ROWS
    elif powers := {number.power for number in numbers.flat if number.coefficient}:
        label = Replicated(powers.pop()) if len(powers) == 1 else ALL_ROWS
    else:
        label = ZEROS if numbers.size else REPLICATED
    return Value(label, dims, numbers)


def join_values(values: Sequence[Value]) -> Value:
    """Returns the value of a tensor that is selected from several tensors, identically on all replicas."""
    values = [value for value in values if value != UNWRITTEN] or [UNWRITTEN]
    first = values[0]
    if all(other == first for other in values[1:]):
        return first
    dims, ranks = None, {None if value.dims is None else value.rank for value in values}
    if len(ranks) == 1 and None not in ranks:
        axes = zip(*(value.known_dims for value in values), strict=True)
        dims = tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in axes)
    elements = [value.element for value in values if value.element is not None]
    variable = first.variable if all(value.variable == first.variable for value in values) else None
    label = join([value.label for value in values])
    if isinstance(label, ReplicatedPlusSum) and len(bases := {value.base for value in values}) == 1:
        label = dataclasses.replace(label, variable=bases.pop())
    if isinstance(label, Rows) and (dims is None or dims[label.axis] != label.size):
        label = ALL_ROWS
    return Value(label, dims, None, join_values(elements) if elements else None, variable)


def broadcast_dims(values: Sequence[Value]) -> Dims | None:
    """Returns the dims of tensors that are broadcast against each other; None if a rank is unknown."""
    if any(value.dims is None for value in values):
        return None
    return tuple(map(broadcast_dim, broadcast_sizes(values)))


def broadcast_dim(sizes: set[Size | None]) -> Size | None:
    """Returns the dim to which several dims, without those of 1, are broadcast: a number, because a symbol may be 1."""
    if len(sizes) < 2:
        return next(iter(sizes), ONE)
    return next((size for size in sizes if size is not None and size.is_known), None)


def broadcast_sizes(values: Sequence[Value]) -> list[set[Size | None]]:
    """Returns, for each axis of tensors that are broadcast against each other, the sizes other than 1."""
    rank = max(value.rank for value in values)
    return [
        {value.known_dims[position] for value in values if value.rank >= -position} - {ONE}
        for position in range(-rank, 0)
    ]


def axis_of_rows(values: Sequence[Value]) -> tuple[int, Size] | None:
    """Returns the common axis of all values that are rows, counted from the right (negative), and its size.

    Other values must be broadcast along this axis. Returns None if values disagree.
    """
    labels = [(value.rank, value.label) for value in values if isinstance(value.label, Rows)]
    common, *others = {(label.axis - rank, label.size) for rank, label in labels} or [None]
    if common is None or others:
        return None
    for value in values:
        if not isinstance(value.label, Rows) and value.rank >= -common[0] and value.known_dims[common[0]] != ONE:
            return None
    return common
