"""Reduction operations, with Horovod's names and values."""

import enum
import warnings

from tfdist.errors import InputError


class ReduceOp(enum.IntEnum):
    """A reduction operation; its value equals Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> ReduceOp:
    """Returns the operation given by `op` or the deprecated `average`; defaults to Average."""
    if average is not None:
        if op is not None:
            raise InputError(
                f"op and average are mutually exclusive. Received: op={op}, average={average}. Remove average."
            )
        warnings.warn("Parameter `average` has been replaced with `op`.", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else to_reduce_op(op)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Returns whether Adasum supports this number of ranks: 1, 2, 4, 8 and so on."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def to_reduce_op(value: int) -> ReduceOp:
    """Returns the operation with this value; raises `InputError` for unknown values."""
    try:
        return ReduceOp(value)
    except ValueError:
        names = ", ".join(f"hvd.{reduce_op.name}" for reduce_op in ReduceOp)
        raise InputError(f"op must be one of {names}. Received: {value!r}. Use op=hvd.Average.") from None
