"""Ends a training process after the loss of another one, with a message and exit code 5."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from tfdist.cluster.environment import Cluster
from tfdist.cluster.signals import flush, print_line
from tfdist.coordination.client import goodbye_of
from tfdist.coordination.group import Group, LostMember, name_member
from tfdist.errors import ExitCode, PeerLostError, TfdistError

LOSS_NOTICE_SECONDS = 2.0  # to wait for the notice of a loss, which may arrive after an engine's error
OWN_FAILURE_SECONDS = 3.0  # in which this process may fail for the same reason, such as a NaN as training loss


class PeerFailureHandler(contextlib.AbstractContextManager["PeerFailureHandler"]):
    """Ends this process after the loss of another member during training.

    On the first loss, prints one line that names the lost member. Ends the process with code 5 if it is still running after
    `grace` seconds: the main thread is probably stuck in a collective that can never complete.

    As a context manager, also leaves the group with the exit code of the exception. After an engine's error that was
    caused by the loss of another process, it ends the process with code 5, without running Python's exit handlers, because
    an engine may hang or abort in its destructors without its peers.
    """

    def __init__(
        self,
        group: Group,
        cluster: Cluster,
        stream: TextIO = sys.stderr,
        grace: float = 5.0,
        end: Callable[[int], object] = os._exit,
    ):
        """Subscribes to the losses of a group.

        Args:
          group: the group to watch.
          cluster: this process's rank and size, for the message.
          stream: where the message is printed.
          grace: seconds to wait for the process to end before it is ended.
          end: ends the process immediately with an exit code.
        """
        self._group, self._stream, self._grace, self._end = group, stream, grace, end
        self._name = f"rank {cluster.rank} of {cluster.size}"
        self._report_lock = threading.Lock()
        self._is_reported = False
        self._closed = threading.Event()
        group.on_loss(self._handle_loss)

    def close(self) -> None:
        """Ignores later losses, because the process is about to end."""
        self._closed.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Other errors of tfdist have other causes, such as a training loss that is not finite.
        may_be_loss = isinstance(error, PeerLostError) or not isinstance(error, TfdistError)
        if isinstance(error, Exception) and may_be_loss and (loss := self._group.first_loss(LOSS_NOTICE_SECONDS)):
            self._report(loss)
            self.close()
            self._group.leave(ExitCode.PEER_LOST)
            self._end_process()
        self.close()
        self._group.leave(*goodbye_of(error))

    def _handle_loss(self, loss: LostMember) -> None:
        delay = 0.0 if loss.code is None else OWN_FAILURE_SECONDS
        if self._closed.wait(delay):
            return
        self._report(loss)
        if not self._closed.wait(self._grace):
            self._end_process()

    def _report(self, loss: LostMember) -> None:
        with self._report_lock:
            if not self._is_reported and not self._group.goodbye_code:
                self._is_reported = True
                member = name_member(loss.rank, loss.noun) + self._group.role(loss.rank)
                text = f"{member} is lost: {loss.reason}".rstrip(".")  # the reason may be a complete sentence
                print_line(f"{self._name}: {text}. Ending with code {ExitCode.PEER_LOST:d}.", self._stream)

    def _end_process(self) -> None:
        for stream in (sys.stdout, sys.stderr, self._stream):
            flush(stream)
        # Not a loss if this process has left the group with its own exit code.
        self._end(self._group.goodbye_code or ExitCode.PEER_LOST)
