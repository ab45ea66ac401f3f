"""Meetings that ranks come to with work behind them whose length nobody knows: data to load, a disk that is slow."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 3600.0
WORD_AFTER_SECONDS = 60.0

_log = logging.getLogger(__name__)


@contextmanager
def long_timeout(with_what: str) -> Iterator[float]:
    """Gives the deadline of a meeting of a `Group` inside, in seconds, and says so if it lasts.

    Who is lost is known at once, whatever the deadline: it ends the waiting for those that live and do not come.

    Args:
      with_what: may keep the others, as it ends the warning: "its data".
    """
    timer = threading.Timer(
        WORD_AFTER_SECONDS,
        _log.warning,
        (
            "Other ranks have not come for %g s: one may be busy with %s. This one waits up to %g s. SIGUSR1 to a rank shows "
            "where it is.",
            WORD_AFTER_SECONDS,
            with_what,
            SECONDS,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield SECONDS
    finally:
        timer.cancel()
