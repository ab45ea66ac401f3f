"""Timeouts for gathers that may follow work of unknown duration, such as loading data or writing to a slow disk."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LONG_SECONDS = 3600.0  # for a rank that may read or write large files, compile, or wait for one that does
WARNING_SECONDS = 60.0

_log = logging.getLogger(__name__)


@contextmanager
def long_timeout(with_what: str) -> Iterator[float]:
    """Yields the deadline in seconds for a `Group` operation in the body, and logs a warning if it takes long.

    A lost member is detected at once, whatever the deadline, which only limits the waiting for members that are alive.

    Args:
      with_what: what may keep the other ranks busy, for the warning: "its data".
    """
    timer = threading.Timer(
        WARNING_SECONDS,
        _log.warning,
        (
            "Other ranks have not arrived for %g s: one may be busy with %s. This rank waits up to %g s. Send SIGUSR1 "
            "to a rank to print its stack.",
            WARNING_SECONDS,
            with_what,
            LONG_SECONDS,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield LONG_SECONDS
    finally:
        timer.cancel()
