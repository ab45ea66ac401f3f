"""Parses numbers of bytes: `512`, `64KB`, `1.5 GiB`."""

import re

from tfdist.errors import InputError

UNITS_HELP = "KB and KiB are 1024 bytes"
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT])i?B?|B)?\s*", re.IGNORECASE)


def parse_byte_size(size: int | str, name: str) -> int:
    """Returns a number of bytes.

    Units are powers of 1024, as sizes of memory and of messages are; `64KB`, `64KiB`, `64K` and `64kb` are the same.

    Args:
      size: the number, or a text such as "2GiB", "1.5 GiB" or "500MB".
      name: what the size is, for the error message.

    Raises:
      InputError: it is something else, or less than 1.
    """
    found = _SIZE.fullmatch(str(size))
    power = " KMGT".index((found[2] or " ").upper()) if found else 0
    count = int(float(found[1]) * 1024**power) if found else 0
    if isinstance(size, bool) or count < 1:
        raise InputError(
            f"{name} must be a number of bytes above 0, such as 512, 64KB or 2GiB; {UNITS_HELP}. Received: {size!r}."
        )
    return count
