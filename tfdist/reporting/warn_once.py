"""Warnings about suspicious situations, each logged once per process."""

import functools
import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)


def warn_once(text: str, situation: str = "") -> None:
    """Logs a warning, unless it has already been logged in this process; call it on the chief only.

    Args:
      text: what was found, why it matters, and what to do.
      situation: name of the situation, if there are several texts about it: only the first of them is logged.
    """
    _logging_once(situation or text)(text)


@functools.cache
def _logging_once(situation: str) -> Callable[[str], None]:
    """Returns the function that logs the first text about a situation, the same one for each call."""
    remaining = [_log.warning]

    def say(text: str) -> None:
        if remaining:
            remaining.pop()("%s", text)

    return say


def forget() -> None:
    """Forgets what has been logged; for tests."""
    _logging_once.cache_clear()
