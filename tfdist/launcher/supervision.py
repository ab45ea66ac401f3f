"""Supervises the processes of one launcher: forwards their output, and ends all when one fails."""

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfdist.coordination import LostMember
from tfdist.coordination.group import name_ranks
from tfdist.errors import ExitCode, exceptions
from tfdist.launcher.child import Child
from tfdist.launcher.job import Outcome, root_cause
from tfdist.launcher.output_forwarding import Channel

POLL_SECONDS = 0.02
SETTLE_SECONDS = 0.7  # for the cause to appear after a consequence
FAILURE_SECONDS = 3.0  # between SIGTERM and SIGKILL after a failure
DRAIN_SECONDS = 0.5  # for the last output to arrive


class Stop(NamedTuple):
    """Why running processes must end.

    Attributes:
      outcome: outcome of the job, unless a process of this launcher turns out to be the cause.
      seconds: between SIGTERM and SIGKILL.
      asked: whether the end was requested; if all processes then exit with the same code, it is the job's exit code.
      final: whether the job is over, so that it is not restarted.
      wait: seconds for the processes to end by themselves, before SIGTERM.
    """

    outcome: Outcome
    seconds: float = FAILURE_SECONDS
    asked: bool = False
    final: bool = True
    wait: float = 0.0


def deadline(seconds: float) -> Callable[[], Stop | None]:
    """Returns a check that ends the processes this many seconds from now."""
    end = time.monotonic() + seconds
    stop = Stop(Outcome(ExitCode.STALLED, f"the processes did not end within {seconds:g} s"))
    return lambda: stop if time.monotonic() > end else None


class Watched(NamedTuple):
    """What a supervisor watches besides its processes.

    Attributes:
      stops: polled for a reason to end the processes.
      look: called periodically.
      hurry: returns whether the user has repeated the request to end.
      loss: returns the first loss in the ranks' group.
      on_stop: called with a failure before the processes are ended.
      grace: seconds to wait for the other processes after the first one has exited with code 75; then they have failed.
      together: whether to wait a moment after a failure, to see which other processes fail for the same reason.
    """

    stops: Sequence[Callable[[], Stop | None]] = ()
    look: Callable[[], object] = lambda: None
    hurry: Callable[[], bool] = lambda: False
    loss: Callable[[], LostMember | None] = lambda: None
    on_stop: Callable[[Outcome], None] = lambda outcome: None
    grace: float = 60.0
    together: bool = False


class Supervisor:
    """Supervises a launcher's processes until they have ended."""

    def __init__(self, children: Sequence[Child], channels: Sequence[Channel], watched: Watched):
        """Initializes the supervisor.

        Args:
          children: started processes.
          channels: their outputs.
          watched: what else to watch.
        """
        self._children = children
        self._watched = watched
        self._stopped: Stop | None = None
        self._selector = selectors.DefaultSelector()
        for channel in channels:
            self._selector.register(channel, selectors.EVENT_READ)

    @property
    def stopped(self) -> bool:
        """Whether the end of the job was requested."""
        return self._stopped is not None and self._stopped.final

    def run(self) -> Outcome:
        """Waits for all processes to end, and returns how; none is left running, even after an exception."""
        try:
            stop = self._wait_for_a_stop()
            if stop:
                self._watched.on_stop(stop.outcome)
                self._let_lost_rank_end()
                if stop.asked and self._cause().code == ExitCode.PREEMPTED:  # all already end without a signal
                    stop = stop._replace(wait=max(stop.wait, stop.seconds), seconds=FAILURE_SECONDS)
                self._wait_until(lambda: self._all_ended() or self._watched.hurry(), stop.wait)
                self._terminate(stop.seconds)
            return self._conclude(stop)
        except BaseException:
            self._terminate(FAILURE_SECONDS)
            raise
        finally:
            for child in self._children:
                child.reap()
            self._drain()

    def _wait_for_a_stop(self) -> Stop | None:
        self._wait_until(lambda: self._poll_stops() or self._cause().code or self._all_ended())
        if self._cause().code == ExitCode.PEER_LOST:  # a consequence, so wait for the cause
            self._wait_until(lambda: self._poll_stops() or self._cause().code != ExitCode.PEER_LOST, SETTLE_SECONDS)
        elif self._watched.together and ExitCode.DONE < self._cause().code < min(
            ExitCode.PREEMPTED, exceptions.SIGNALLED
        ):
            self._wait_until(lambda: self._poll_stops() or self._all_ended(), SETTLE_SECONDS)
        if (
            self._cause().code == ExitCode.PREEMPTED
        ):  # a signal would be the processes' second, and keep them from saving
            self._wait_until(
                lambda: self._poll_stops() or self._all_ended() or self._cause().code != ExitCode.PREEMPTED,
                self._watched.grace,
            )
        cause = self._cause()
        if cause.code == ExitCode.PREEMPTED and not self._all_ended():
            cause = self._hanging(cause)
        return self._stopped or (Stop(cause) if cause.code else None)

    def _let_lost_rank_end(self) -> None:
        """Waits for a process that has said goodbye: its exit handlers may record why it failed."""
        loss = self._watched.loss()
        leaving = [child for child in self._children if loss and loss.code and child.rank == loss.rank]
        self._wait_until(
            lambda: self._poll_stops() or self._watched.hurry() or all(child.poll() for child in leaving),
            FAILURE_SECONDS,
        )

    def _hanging(self, preempted: Outcome) -> Outcome:
        """Returns the failure of processes that still run long after another one was preempted."""
        ranks = [child.rank for child in self._children if child.code is None]
        late = f"{name_ranks(ranks)} did not end within {self._watched.grace:g} s (--grace_seconds)"
        return Outcome(ExitCode.PEER_LOST, f"{late}, although {preempted.reason}", ranks[0])

    def _poll_stops(self) -> bool:
        for check in self._watched.stops:
            self._stopped = self._stopped or check()
        return self._stopped is not None

    def _terminate(self, seconds: float) -> None:
        self._signal(signal.SIGTERM)
        self._wait_until(lambda: self._all_ended() or self._watched.hurry(), seconds)
        self._signal(signal.SIGKILL)
        self._wait_until(self._all_ended, FAILURE_SECONDS)

    def _conclude(self, stop: Stop | None) -> Outcome:
        """Returns the outcome; the cause may have appeared only while the processes were being ended."""
        codes = {child.code for child in self._children}
        code, *others = codes
        if stop and code is not None and not others and code <= exceptions.SIGNALLED:
            if stop.asked or code == ExitCode.PREEMPTED:
                return Outcome(code, f"all ranks ended with {exceptions.describe(code)}" if code else "")
        if codes == {ExitCode.DONE, ExitCode.PREEMPTED}:
            first = next(child.rank for child in self._children if child.code == ExitCode.PREEMPTED)
            return Outcome(
                ExitCode.PREEMPTED, f"rank {first} ended with {exceptions.describe(ExitCode.PREEMPTED)}", first
            )
        cause = self._cause()
        if stop and cause.code in (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.PEER_LOST):
            return self._requested(stop).outcome
        return cause

    def _requested(self, stop: Stop) -> Stop:
        """Returns the user's request if one arrived during a resize, in which case not all processes have saved."""
        requests = [check() for check in self._watched.stops] if stop.outcome.code == ExitCode.PREEMPTED else []
        return next((request for request in requests if request and request.final), stop)

    def _cause(self) -> Outcome:
        return root_cause(self._children, self._watched.loss())

    def _all_ended(self) -> bool:
        return all(child.poll() for child in self._children)

    def _signal(self, number: int) -> None:
        for child in self._children:
            child.signal(number)

    def _wait_until(self, condition: Callable[[], object], seconds: float = float("inf")) -> None:
        """Forwards output until the condition holds or the time is up."""
        end = time.monotonic() + seconds
        while True:
            self._watched.look()
            for child in self._children:
                child.poll()
            if condition() or time.monotonic() > end:
                return
            self._pump()

    def _drain(self) -> None:
        """Forwards the remaining output, for a limited time: a process outside its group may keep a pipe open."""
        end = time.monotonic() + DRAIN_SECONDS
        while self._selector.get_map() and time.monotonic() < end:
            self._pump()
        for key in self._selector.get_map().values():
            key.fileobj.close()  # type: ignore[union-attr]  # a Channel
        self._selector.close()

    def _pump(self) -> None:
        if not self._selector.get_map():  # all have closed their outputs but are still running
            time.sleep(POLL_SECONDS)
            return
        for key, _ in self._selector.select(POLL_SECONDS):
            channel = key.fileobj
            assert isinstance(channel, Channel)
            if not channel.pump():
                self._selector.unregister(channel)
                channel.close()
