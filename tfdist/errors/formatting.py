"""Numbers and suggestions in messages of errors."""

import difflib
import numbers
from collections.abc import Iterable
from typing import Any, TypeGuard


def count_of(number: int, name: str) -> str:
    """Returns a number with the singular or the plural of a name: `1 replica`, `8 micro-batches`, `1,200 steps`."""
    plural = "es" if name.endswith(("batch", "process")) else "s"
    return f"{number:,} {name}{'' if number == 1 else plural}"


def byte_size(count: float) -> str:
    """Formats a number of bytes with a suitable unit: `512 bytes`, `38.1 MiB`."""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def is_integer(value: Any) -> TypeGuard[int]:
    """Returns whether a value is an integer, such as 3 or `numpy.int64(3)`."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a real number, such as 3, 0.5 or `numpy.float32(0.5)`."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_python(value: Any) -> Any:
    """Converts a number to Python's int or float, which both files and TensorFlow constants accept."""
    return int(value) if is_integer(value) else float(value)


def nearest(word: str, known_names: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name, such as ` Did you mean "mirrored"? Known: mirrored, single.`."""
    names = sorted(known_names)
    return f"{did_you_mean(word, names)} Known: {', '.join(names) or 'none'}."


def did_you_mean(word: str, known_names: Iterable[str], form: str = "{}") -> str:
    """Returns only the question, such as ` Did you mean "mirrored"?`, or "" if no name is similar.

    Args:
      word: the unknown name.
      known_names: all known names.
      form: format of a suggested name, with `{}` for the name.
    """
    by_lower = {name.lower(): name for name in known_names}
    matches = difflib.get_close_matches(word.lower(), by_lower)
    if not matches and len(word) > 1:  # such as f1 for f1_score
        matches = [name for name in by_lower if name.startswith(word.lower())][:3]
    suggestions = " or ".join(f'"{form.format(by_lower[name])}"' for name in matches)
    return f" Did you mean {suggestions}?" if matches else ""
