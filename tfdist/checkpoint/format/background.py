"""Writes checkpoints in the background."""

import threading
from collections.abc import Callable


class BackgroundWriter:
    """A thread that writes at most one checkpoint at a time.

    It is a daemon thread: a program must wait for data that has to be on disk.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Starts a write after the previous one has completed.

        Args:
          write: function that writes; its exception is raised by `wait` or the next `start`.

        Raises:
          BaseException: exception of the previous write; then nothing is started.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until nothing is being written.

        Raises:
          BaseException: exception of the write, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:  # raised in `wait`
            self._error = error
