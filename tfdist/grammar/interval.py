"""How often something happens: every so many steps, or every so many seconds."""

import re
from typing import NamedTuple

from tfdist.errors import InputError


class Interval(NamedTuple):
    """One of the two is above 0, or neither for never.

    Attributes:
      steps: updates from one time to the next.
      seconds: of wall time.
    """

    steps: int = 0
    seconds: float = 0.0


def parse_period(text: str) -> Interval:
    """Reads `500` (steps), `600s` (seconds), or an empty text or 0 (never).

    Raises:
      InputError: it is neither.
    """
    found = re.fullmatch(r"(\d{1,18})|(\d{1,18}(?:\.\d{1,9})?)s", text.strip() or "0")
    if not found or (found[2] and not float(found[2])):
        raise InputError(f"{text} must be a number of steps such as 500, or of seconds such as 600s")
    return Interval(seconds=float(found[2])) if found[2] else Interval(steps=int(found[1]))
