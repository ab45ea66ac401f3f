"""Parses intervals in steps or seconds."""

import re
from typing import NamedTuple

from tfdist.errors import InputError


class Interval(NamedTuple):
    """An interval; at most one of the fields is positive, and neither means never.

    Attributes:
      steps: number of steps.
      seconds: wall time.
    """

    steps: int = 0
    seconds: float = 0.0


def parse_period(text: str) -> Interval:
    """Parses `500` (steps), `600s` (seconds), or an empty text or 0 (never).

    Raises:
      InputError: the text is none of these.
    """
    found = re.fullmatch(r"(\d{1,18})|(\d{1,18}(?:\.\d{1,9})?)s", text.strip() or "0")
    if not found or (found[2] and not float(found[2])):
        raise InputError(f"{text} must be a number of steps such as 500, or of seconds such as 600s")
    return Interval(seconds=float(found[2])) if found[2] else Interval(steps=int(found[1]))
