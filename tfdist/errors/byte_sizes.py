"""Numbers of bytes as text."""

import re

from tfdist.errors.exceptions import InputError

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}} | {
    f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)
}


def byte_size(count: float) -> str:
    """Returns a number of bytes in the unit that suits it: `512 bytes`, `38.1 MiB`."""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def parse_byte_size(size: int | str) -> int:
    """Returns a number of bytes.

    Args:
      size: the number, or a text such as "2GiB", "1.5 GiB" or "500MB".

    Raises:
      InputError: it is something else, or less than 1.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size))
    unit = _UNITS.get(found[2]) if found else None
    count = int(float(found[1]) * unit) if found and unit else 0
    if isinstance(size, bool) or count < 1:
        raise InputError(f"memory must be a number of bytes, such as 2GiB or 500MB. Received: {size!r}.")
    return count
