"""Warnings about suspicious situations, each logged once per process."""

import functools
import logging

_log = logging.getLogger(__name__)


def warn_once(text: str, situation: str = "") -> None:
    """Logs a warning, unless it has already been logged in this process; call it on the chief only.

    Args:
      text: the finding, its consequence, and the remedy.
      situation: name of the situation, if there are several texts about it: only the first of them is logged.
    """
    logged = _texts(situation or text)
    if not logged:
        logged.append(text)
        _log.warning("%s", text)


@functools.cache
def _texts(situation: str) -> list[str]:
    """Returns the list of the texts logged about a situation, the same list for each call."""
    return []


def forget() -> None:
    """Clears the record of logged warnings; for tests."""
    _texts.cache_clear()
