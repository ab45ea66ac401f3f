"""Facts about a tensor: its label, its dims, its numbers if they are computed from shapes, and what a list contains."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdist.row_semantics.labels import ALL_ROWS, REPLICATED, ZEROS, Label, Replicated, ReplicatedPlusSum, Rows, join
from tfdist.row_semantics.sizes import ONE, Size

Dims = tuple[Size | None, ...]


class NoRuleError(Exception):
    """The label of a result cannot be derived; the message says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """What is known of a tensor.

    Attributes:
      label: how replicas' values make up the value of all rows.
      dims: its dims; None if the rank is unknown, and None for an unknown dim.
      numbers: array of its elements as sizes, None for unknown elements; None if there are too many or none is known.
        The label is `AllRows` if their powers of COUNT differ, as in a shape.
      element: for a list of tensors, what is known of each of them.
      variable: for a resource, the variable; for a value, the variable that it was read from, unchanged.
    """

    label: Label
    dims: Dims | None = None
    numbers: np.ndarray | None = None
    element: "Value | None" = None
    variable: object = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        same_numbers = self.numbers is other.numbers or (
            self.numbers is not None and other.numbers is not None and np.array_equal(self.numbers, other.numbers)
        )
        return same_numbers and all(
            getattr(self, name) == getattr(other, name) for name in ("label", "dims", "variable", "element")
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def known_label(self) -> Label:
        """The label, if the shape is known as well: zeros that a loop did not write into a list have any shape."""
        is_unknown = self.dims is not None and None in self.dims and self.label != ALL_ROWS
        return ALL_ROWS if is_unknown else self.label

    @property
    def base(self) -> object:
        """The variable whose value it is, or is the base of a sum that is added to it; None if it is neither."""
        return self.label.variable if isinstance(self.label, ReplicatedPlusSum) else self.variable

    @property
    def rank(self) -> int:
        """The number of axes.

        Raises:
          NoRuleError: it is unknown.
        """
        return len(self.known_dims)

    @property
    def known_dims(self) -> Dims:
        """The dims.

        Raises:
          NoRuleError: their number is unknown.
        """
        if self.dims is None:
            raise NoRuleError("the rank is unknown")
        return self.dims

    @property
    def is_replicated(self) -> bool:
        """Whether it is equal on all replicas, and on one device."""
        return isinstance(self.label, Replicated) and not self.label.power and self.element is None

    @property
    def known_numbers(self) -> list[Size]:
        """Its elements, all of them known.

        Raises:
          NoRuleError: they are not.
        """
        if self.numbers is None or any(each is None for each in self.numbers.flat):
            raise NoRuleError("the numbers are unknown")
        return list(self.numbers.flat)

    @property
    def integers(self) -> list[int]:
        """Its elements, known integers.

        Raises:
          NoRuleError: they are not.
        """
        try:
            return [int(each) for each in self.known_numbers]
        except ValueError as error:
            raise NoRuleError(str(error)) from None


# What a loop has not written into a list yet: zeros, of any shape.
UNWRITTEN = Value(ZEROS)


def of_numbers(numbers: np.ndarray, dims: Dims | None = None) -> Value:
    """Returns the value with these elements."""
    if any(each is None for each in numbers.flat):
        label: Label = ALL_ROWS
    elif powers := {each.power for each in numbers.flat if each.coefficient}:
        label = Replicated(powers.pop()) if len(powers) == 1 else ALL_ROWS
    else:
        label = ZEROS if numbers.size else REPLICATED
    return Value(label, dims, numbers)


def join_values(values: Sequence[Value]) -> Value:
    """Returns what is known of one of several tensors, chosen equally on all replicas."""
    values = [value for value in values if value != UNWRITTEN] or [UNWRITTEN]
    first = values[0]
    if all(other == first for other in values[1:]):
        return first
    dims = None
    if all(
        value.dims is not None and first.dims is not None and len(value.dims) == len(first.dims) for value in values
    ):
        dims = tuple(
            each[0] if len(set(each)) == 1 else None
            for each in zip(*(value.known_dims for value in values), strict=True)
        )
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
    """Returns the dim to which dims that are not 1 are broadcast: one that may be 1 is, one known to be larger is not."""
    if len(sizes) < 2:
        return next(iter(sizes), ONE)
    return next((each for each in sizes if each is not None and each.is_known), None)


def broadcast_sizes(values: Sequence[Value]) -> list[set[Size | None]]:
    """Returns for each axis of tensors that are broadcast against each other the sizes that are not 1."""
    rank = max(value.rank for value in values)
    return [
        {value.known_dims[position] for value in values if value.rank >= -position} - {ONE}
        for position in range(-rank, 0)
    ]


def axis_of_rows(values: Sequence[Value]) -> tuple[int, Size] | None:
    """Returns the axis of the rows from the right (negative) and its size, common to all values that are rows.

    Values that are not must be broadcast along this axis. Returns None if they do not agree.
    """
    common = None
    for value in values:
        if isinstance(value.label, Rows):
            this = (value.label.axis - value.rank, value.label.size)
            if common not in (None, this):
                return None
            common = this
    if common is None:
        return None
    for value in values:
        if not isinstance(value.label, Rows) and value.rank >= -common[0] and value.known_dims[common[0]] != ONE:
            return None
    return common
