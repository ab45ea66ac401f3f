"""The share of a vector that a sparse method sends, and checks of what such methods are given."""

from tfdist.errors import InputError


def checked_ratio(method: str, ratio: float) -> float:
    """Returns a ratio that is in (0, 1]; `method` names it in the error."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise InputError(f"{method} needs a ratio in (0, 1]. Received: {ratio!r}. Write, say, {method}(ratio=0.01).")
    return float(ratio)


def kept(ratio: float, size: int) -> int:
    """How many of `size` elements are sent: max(1, round(ratio size)), of an empty vector none."""
    return min(size, max(1, round(ratio * size)))
