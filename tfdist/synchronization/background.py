"""A call that may run in a thread of its own, alongside the main thread."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class BackgroundCall(Generic[_T]):
    """A call of a function; its result, or its error, is taken by another thread.

    The thread is a daemon, unlike those of `concurrent.futures`: a call that waits for a lost process must not keep this
    one from ending.
    """

    def __init__(self, function: Callable[[], _T], begun: threading.Event, *, in_background: bool):
        """Calls the function.

        Args:
          function: takes no arguments.
          begun: set by the function once it may run alongside other calls.
          in_background: whether to call it in a thread, and to return when it has begun.
        """
        self._function, self._begun = function, begun
        self._future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        if in_background:
            begun.clear()
            threading.Thread(target=self._run, name="tfdist-exchange", daemon=True).start()
            begun.wait()
        else:
            self._run()

    def result(self) -> _T:
        """Waits for the call and returns its result, or raises its error."""
        return self._future.result()

    def wait(self, seconds: float) -> None:
        """Waits until the call has ended, but no longer than this."""
        concurrent.futures.wait([self._future], seconds)

    def _run(self) -> None:
        # `begun` is set before the future: whoever waits for the result may then start the next call, which shares it.
        try:
            result = self._function()
        except BaseException as error:
            self._begun.set()
            self._future.set_exception(error)
        else:
            self._begun.set()
            self._future.set_result(result)
