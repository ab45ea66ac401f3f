"""Logs each warning only once per process."""

import functools
import logging

_log = logging.getLogger(__name__)


def warn_once(text: str, situation: str = "") -> None:
    """Logs a warning, unless it has already been logged in this process; call it on the chief only.

    Args:
      text: the finding, its consequence, and the remedy.
      situation: name of a situation with several texts; only the first of them is logged.
    """
    logged_texts = _logged_texts(situation or text)
    if not logged_texts:
        logged_texts.append(text)
        _log.warning("%s", text)


@functools.cache
def _logged_texts(situation: str) -> list[str]:
    return []


def forget() -> None:
    """Clears the record of logged warnings; for tests."""
    _logged_texts.cache_clear()
