"""Logs each warning only once per process."""

import logging

_log = logging.getLogger(__name__)
logged_situations: set[str] = set()


def warn_once(text: str, situation: str = "") -> None:
    """Logs a warning, unless it has already been logged in this process; call it on the chief only.

    Of a `situation` with several texts, only the first is logged. A text is the finding, its consequence, and the remedy.
    """
    if (situation or text) not in logged_situations:
        logged_situations.add(situation or text)
        _log.warning("%s", text)
