"""Output that never blocks for long: nobody may be reading it, as if the launcher that reads a pipe is stopped."""

import contextlib
import threading
from collections.abc import Callable
from typing import TextIO

PATIENCE_SECONDS = 1.0


def print_line(line: str, stream: TextIO) -> None:
    """Prints a line and flushes the stream; gives up after a second, or if the stream is closed or broken.

    It is one write, so that what other threads and libraries print does not come between the line and its end.
    """
    _try(lambda: (stream.write(f"{line}\n"), stream.flush()))


def flush(stream: TextIO) -> None:
    """Flushes a stream; gives up as `print_line` does."""
    _try(stream.flush)


def _try(action: Callable[[], object]) -> None:
    def suppressed() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=suppressed, name="output", daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
