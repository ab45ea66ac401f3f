"""Labels: how the values that replicas compute from their rows make up the value that one device computes from all of them.

Replica r has COUNT_r >= 1 rows of a batch of COUNT = sum of COUNT_r; t_r is a tensor as it computes it, and t as one device
does. Powers of COUNT are carried along, since code divides by the number of rows: a mean is a sum times COUNT^-1.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from tfdist.row_semantics.sizes import Size

Reduction = Literal["sum", "max", "min", "all", "any"]


@dataclasses.dataclass(frozen=True)
class Replicated:
    """t_r = COUNT_r^power u and t = COUNT^power u, where u is the same on all replicas. Zeros have each power: None."""

    power: int | None = 0

    def __str__(self) -> str:
        return "replicated" if not self.power else f"replicated*COUNT^{self.power}"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Along `axis`, t_r / COUNT_r^power are the rows of t / COUNT^power that belong to replica r.

    Attributes:
      axis: axis of the rows.
      size: its size, a multiple of COUNT: what belongs to one row of the batch is contiguous.
      power: power of COUNT; None for zeros, which have each power.
    """

    axis: int
    size: Size
    power: int | None = 0

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
    """A replicated value plus a sum with this power.

    Attributes:
      power: power of the sum.
      variable: the variable whose value the replicated one is; None if it is another value.
    """

    power: int
    variable: object = None

    def __str__(self) -> str:
        return f"replicated + {Partial('sum', self.power)}"


@dataclasses.dataclass(frozen=True)
class AllRows:
    """Depends on the rows of all replicas in another way, or in an unknown one.

    Attributes:
      cause: operation of TensorFlow that decided it; None if a value is only known symbolically.
    """

    cause: Any = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        return "all rows"


Label = Replicated | Rows | Partial | ReplicatedPlusSum | AllRows

REPLICATED, ZEROS, SUM, MEAN, ALL_ROWS = Replicated(), Replicated(None), Partial(), Partial("sum", -1), AllRows()


def is_zero(label: Label) -> bool:
    """Returns whether a label says that all elements are 0."""
    return isinstance(label, Replicated | Rows) and label.power is None


def power_of(label: Label) -> int:
    """Returns the power of COUNT; 0 for zeros, which have each."""
    return 0 if isinstance(label, AllRows) else label.power or 0


def sum_power(label: Label) -> int | None:
    """Returns the power with which a label is a sum over replicas, too; None if it is none, or zeros.

    A replicated value is the mean of itself: COUNT_r^p u sums up with the power p - 1.
    """
    if isinstance(label, Partial) and label.reduction == "sum":
        return label.power
    return label.power - 1 if isinstance(label, Replicated) and label.power is not None else None


def times_count(label: Label, power: int) -> Label:
    """Returns the label of a value times COUNT^power, where COUNT is that of all rows on one device."""
    known = getattr(label, "power", None)
    return label if known is None else dataclasses.replace(label, power=known + power)


def common_power(powers: Iterable[int | None]) -> tuple[bool, int | None]:
    """Returns whether all powers but those of zeros (None) are equal, and this power."""
    distinct = {power for power in powers if power is not None}
    return len(distinct) <= 1, next(iter(distinct), None)


def without_base(label: Label) -> Label:
    """Returns the label of the elements of a tensor in other places: what a sum is added to is no variable any more."""
    return dataclasses.replace(label, variable=None) if isinstance(label, ReplicatedPlusSum) else label


def join(labels: Sequence[Label]) -> Label:
    """Returns the label of a value that is one of several, whole or element by element, chosen equally on all replicas."""
    if not labels:
        return ZEROS
    for label in labels:
        if isinstance(label, AllRows):
            return label
    distinct = [label for label in dict.fromkeys(map(without_base, labels)) if label != ZEROS] or [ZEROS]
    if len(distinct) == 1:
        return distinct[0]
    rows = [label for label in distinct if isinstance(label, Rows)]
    if rows:
        agrees, power = common_power(label.power for label in rows)
        if len(rows) < len(distinct) or not agrees or len({(label.axis, label.size) for label in rows}) > 1:
            return ALL_ROWS
        return Rows(rows[0].axis, rows[0].size, power)
    powers = {sum_power(label) for label in distinct}
    if None not in powers and len(powers) == 1:
        return Partial("sum", powers.pop())  # type: ignore[arg-type]
    return _with_replicated(distinct)


def _with_replicated(labels: Sequence[Label]) -> Label:
    """Returns the label of a value chosen from sums and replicated values."""
    powers = {
        label.power if isinstance(label, ReplicatedPlusSum) else sum_power(label)
        for label in labels
        if label != REPLICATED
    }
    return ALL_ROWS if None in powers or len(powers) != 1 else ReplicatedPlusSum(powers.pop())  # type: ignore[arg-type]


def total(labels: Sequence[Label]) -> Label:
    """Returns the label of the sum of tensors that are not rows."""
    if any(isinstance(label, Partial) and label.reduction != "sum" for label in labels):
        return ALL_ROWS
    return join(labels)
