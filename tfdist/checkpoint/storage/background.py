"""Writes beside the training."""

import threading
from collections.abc import Callable


class BackgroundWriter:
    """One thread of this process that writes, at most one checkpoint at a time.

    The thread does not keep the interpreter from ending: what a program must have on disk, it waits for.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Starts writing, when the write before is done.

        Args:
          write: what to do; what it raises, `wait` or the next `start` raises.

        Raises:
          BaseException: what the write before raised; nothing is started then.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
          BaseException: what the write raised, once.
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
        except BaseException as error:  # to be raised where somebody waits
            self._error = error
