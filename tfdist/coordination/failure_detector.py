"""What a training process does when another one is lost: say so once, and end with the right code."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from tfdist.cluster.environment import Cluster
from tfdist.coordination.group import Group, Loss
from tfdist.errors import ExitCode, PeerLostError, TfdistError, exit_codes

NEWS_SECONDS = 2.0  # by which an engine's error may outrun the group's news of the loss that caused it
OWN_WORD_SECONDS = (
    3.0  # to end of what ended the other (a loss that is not finite is everybody's), with its curves drawn
)


class FailureDetector:
    """Watches over the other members while the main thread trains.

    When one is lost it prints one line that names it, and ends the process with code 5 after `grace` seconds if that
    has not ended by itself: the main thread is likely stuck in a collective that nobody else will join.

    As a context manager it also leaves the group, with the code that the exception says, and turns an engine's error
    that another's loss has caused into exit code 5. That ends the process without Python's farewell: an engine
    whose peers are gone may wait or abort in its destructors.
    """

    def __init__(
        self,
        group: Group,
        cluster: Cluster,
        stream: TextIO,
        grace: float,
        end: Callable[[int], object],
    ):
        """See `watch`."""
        self._group, self._stream, self._grace, self._end = group, stream, grace, end
        self._name = f"rank {cluster.rank} of {cluster.size}"
        self._saying = threading.Lock()
        self._said = False
        self._closed = threading.Event()
        group.on_loss(self._lost)

    def lost(self, wait: float = NEWS_SECONDS) -> Loss | None:
        """Returns the first loss, after its line was printed, waiting up to `wait` seconds for the news.

        For whoever has caught an error of an engine: with a loss, the process should end with code 5.
        """
        loss = self._group.lost(wait)
        if loss:
            self._say(loss)
        return loss

    def close(self) -> None:
        """Stops watching: the process will end by itself."""
        self._closed.set()

    def __enter__(self) -> "FailureDetector":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and _may_be_caused_by_a_loss(error) and self.lost(NEWS_SECONDS):
            self._closed.set()
            self._group.leave(ExitCode.PEER_LOST)
            self._finish()
        self.close()
        self._group.leave(*_farewell(error))

    def _lost(self, loss: Loss) -> None:
        patience = 0.0 if loss.code is None else OWN_WORD_SECONDS
        if self._closed.wait(patience):
            return
        self._say(loss)
        if not self._closed.wait(self._grace):
            self._finish()

    def _say(self, loss: Loss) -> None:
        with self._saying:
            if not self._said and not self._group.left_with:
                self._said = True
                said = str(loss).rstrip(".")  # its reason may be a sentence
                print(f"{self._name}: {said}. Ending with code {ExitCode.PEER_LOST:d}.", file=self._stream, flush=True)

    def _finish(self) -> None:
        for stream in (sys.stdout, sys.stderr, self._stream):
            with contextlib.suppress(Exception):  # a closed or broken stream must not keep the process from ending
                stream.flush()
        self._end(self._group.left_with or ExitCode.PEER_LOST)  # what this process ends of itself is no loss


def watch(
    group: Group,
    cluster: Cluster,
    stream: TextIO = sys.stderr,
    grace: float = 5.0,
    end: Callable[[int], object] = os._exit,
) -> FailureDetector:
    """Watches over a group for a training process; see `FailureDetector`.

    Args:
      group: what is watched.
      cluster: this process, for the line.
      stream: where the line goes.
      grace: in seconds, for the process to end by itself.
      end: ends the process at once with a code.
    """
    return FailureDetector(group, cluster, stream, grace, end)


def _may_be_caused_by_a_loss(error: Exception) -> bool:
    """An error with a cause of its own, such as a loss that is not finite, keeps it."""
    return isinstance(error, PeerLostError) or not isinstance(error, TfdistError)


def _farewell(error: BaseException | None) -> tuple[int, str]:
    if error is None:
        return ExitCode.DONE, ""
    if isinstance(error, TfdistError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return exit_codes.SIGNALLED + signal.SIGINT, ""
    if isinstance(error, SystemExit):
        code = error.code
        return (code if isinstance(code, int) else int(code is not None)), ""
    return ExitCode.FAILED, f"{type(error).__name__}: {error}".partition("\n")[0]
