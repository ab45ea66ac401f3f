"""The fraction of a vector that a sparse method sends, and its validation."""

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_number


def checked_ratio(method: str, ratio: float) -> float:
    """Returns a ratio in (0, 1]; raises `InputError` with the method's name for anything else."""
    if not is_number(ratio) or not 0 < ratio <= 1:
        raise InputError(f"{method} needs a ratio in (0, 1]. Received: {ratio!r}. Write, say, {method}(ratio=0.01).")
    return float(ratio)


def kept(ratio: float, size: int) -> int:
    """Returns how many of `size` elements are sent: max(1, round(ratio size)), or 0 for an empty vector."""
    return min(size, max(1, round(ratio * size)))
