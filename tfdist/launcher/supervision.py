"""Supervises the processes of an attempt on this host: forwards their output, and ends all of them if one fails."""

import dataclasses
import pathlib
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfdist.coordination import Group, LostMember, Server
from tfdist.coordination.group import name_ranks
from tfdist.errors import SIGNAL_OFFSET, ExitCode, describe_code
from tfdist.launcher.child import EVALUATOR_RANK, Child
from tfdist.launcher.job import Job, Outcome, root_cause
from tfdist.launcher.orphan_guard import OrphanGuard
from tfdist.launcher.output_forwarding import Channel, ProgressFiles

POLL_SECONDS = 0.02
SETTLE_SECONDS = 0.7  # time for the cause to appear after its effects
FAILURE_SECONDS = 3.0  # between SIGTERM and SIGKILL after a failure
REMAINING_OUTPUT_SECONDS = 0.5  # time for the last output to arrive
_FIRST_RESERVED_CODE = min(ExitCode.PREEMPTED, SIGNAL_OFFSET)  # lower codes are failures of the program
_PLANNED_CODES = (ExitCode.DONE, ExitCode.PREEMPTED)


class Stop(NamedTuple):
    """A reason to end the running processes.

    Attributes:
      outcome: outcome of the job, unless a process of this launcher is the cause.
      sigkill_delay_seconds: time between SIGTERM and SIGKILL.
      is_requested: whether the end was requested; if all processes then end with the same exit code, the job does, too.
      is_final: whether the job is over and must not be restarted.
      sigterm_delay_seconds: time to wait for the processes to end, before SIGTERM.
    """

    outcome: Outcome
    sigkill_delay_seconds: float = FAILURE_SECONDS
    is_requested: bool = False
    is_final: bool = True
    sigterm_delay_seconds: float = 0.0


StopCheck = Callable[[], Stop | None]


@dataclasses.dataclass(frozen=True)
class Host:
    """State shared by all attempts of a job on this host; see `job_runner.run` for the other attributes.

    Attributes:
      guard: kills the processes if this process is killed.
      logs: directory of the ranks' logs.
      progress_files: the ranks' progress files; None if progress is not needed.
      received_signals: received signals that request the end of the job.
    """

    job: Job
    command: Callable[[int], Sequence[str]]
    environment: Mapping[str, str]
    guard: OrphanGuard
    logs: pathlib.Path
    progress_files: ProgressFiles | None
    stops: Sequence[StopCheck]
    received_signals: Sequence[int]
    say: Callable[[str], None]

    def stop_requested(self) -> Stop | None:
        """Returns a `Stop` if this launcher has received a signal."""
        if not self.received_signals:
            return None
        number = self.received_signals[0]
        outcome = Outcome(SIGNAL_OFFSET + number, f"ended by {signal.Signals(number).name}")
        return Stop(outcome, self.job.grace_seconds, is_requested=True)

    @property
    def has_second_signal(self) -> bool:
        """Whether this launcher has received a second signal."""
        return len(self.received_signals) > 1


def deadline(seconds: float) -> StopCheck:
    """Returns a check that ends the processes after a number of seconds."""
    end = time.monotonic() + seconds
    stop = Stop(Outcome(ExitCode.STALLED, f"the processes did not end within {seconds:g} s"))
    return lambda: stop if time.monotonic() > end else None


class Supervisor:
    """Supervises running processes, and forwards their output through `channels`, until they have ended.

    An evaluator may end at any time. It ends by itself after training, and is ended if training fails or is stopped.
    """

    def __init__(
        self,
        host: Host,
        children: Sequence[Child],
        channels: Sequence[Channel],
        launchers: Group,
        server: Server | None,
        stops: Sequence[StopCheck],
    ):
        """Initializes the supervisor.

        Args:
          host: state of the job on this host.
          children: the processes of the ranks, and the evaluator, if any.
          channels: their output.
          launchers: the launchers of the attempt, to which failures are announced.
          server: server of the ranks' group, if it is here.
          stops: polled for reasons to end the processes.
        """
        self._host, self._launchers, self._server = host, launchers, server
        self._all_children = children
        self._children = [child for child in children if child.rank != EVALUATOR_RANK]
        self._evaluator = next((child for child in children if child.rank == EVALUATOR_RANK), None)
        self._has_evaluator_ended = False
        self._stops = stops
        self._stop: Stop | None = None
        self._selector = selectors.DefaultSelector()
        for channel in channels:
            self._selector.register(channel, selectors.EVENT_READ)

    @property
    def is_stopped(self) -> bool:
        """Whether the end of the job was requested."""
        return self._stop is not None and self._stop.is_final

    def run(self) -> Outcome:
        """Waits for all processes to end, and returns the outcome; ends all processes after an exception."""
        try:
            stop = self._wait_for_stop()
            if stop:
                if stop.outcome.code != ExitCode.PREEMPTED:  # leaving ends the ranks on all hosts
                    self._launchers.leave(stop.outcome.code, stop.outcome.reason)
                self._wait_for_lost_rank()
                if stop.is_requested and self._cause().code == ExitCode.PREEMPTED:  # all are already ending
                    stop = stop._replace(
                        sigterm_delay_seconds=max(stop.sigterm_delay_seconds, stop.sigkill_delay_seconds),
                        sigkill_delay_seconds=FAILURE_SECONDS,
                    )
                self._wait_until(lambda: self._all_ended() or self._host.has_second_signal, stop.sigterm_delay_seconds)
                self._terminate(stop.sigkill_delay_seconds)
            elif self._evaluator:
                self._wait_until(lambda: self._all_ended(with_evaluator=True) or self._poll_stops())
                self._terminate(FAILURE_SECONDS)
            return self._outcome(stop)
        except BaseException:
            self._terminate(FAILURE_SECONDS)
            raise
        finally:
            for child in self._all_children:
                child.reap()
            self._forward_remaining_output()

    def _wait_for_stop(self) -> Stop | None:
        self._wait_until(lambda: self._poll_stops() or self._cause().code or self._all_ended())
        if self._cause().code == ExitCode.PEER_LOST:  # wait for the cause
            is_ending = self._loss and self._loss.code  # a rank has ended because another one is about to end
            seconds = FAILURE_SECONDS if is_ending else SETTLE_SECONDS
            self._wait_until(lambda: self._poll_stops() or self._cause().code != ExitCode.PEER_LOST, seconds)
        elif self._host.job.is_elastic and ExitCode.DONE < self._cause().code < _FIRST_RESERVED_CODE:
            self._wait_until(lambda: self._poll_stops() or self._all_ended(), SETTLE_SECONDS)
        if self._cause().code == ExitCode.PREEMPTED:  # a second signal would prevent the processes from saving
            self._wait_until(
                lambda: self._poll_stops() or self._all_ended() or self._cause().code != ExitCode.PREEMPTED,
                self._host.job.grace_seconds,
            )
        cause = self._cause()
        if cause.code == ExitCode.PREEMPTED and not self._all_ended():
            ranks = [child.rank for child in self._children if child.code is None]
            text = f"{name_ranks(ranks)} did not end within {self._host.job.grace_seconds:g} s (--grace_seconds)"
            cause = Outcome(ExitCode.PEER_LOST, f"{text}, although {cause.reason}", ranks[0])
        return self._stop or (Stop(cause) if cause.code else None)

    def _wait_for_lost_rank(self) -> None:
        """Waits for the process that has left the group, whose exit handlers may record its failure."""
        loss = self._loss
        leaving_children = [child for child in self._children if loss and loss.code and child.rank == loss.rank]
        self._wait_until(
            lambda: (
                self._poll_stops() or self._host.has_second_signal or all(child.poll() for child in leaving_children)
            ),
            FAILURE_SECONDS,
        )

    def _poll_stops(self) -> bool:
        for check in self._stops:
            self._stop = self._stop or check()
        return self._stop is not None

    def _terminate(self, seconds: float) -> None:
        self._signal(signal.SIGTERM)
        self._wait_until(lambda: self._all_ended(with_evaluator=True) or self._host.has_second_signal, seconds)
        self._signal(signal.SIGKILL)
        self._wait_until(lambda: self._all_ended(with_evaluator=True), FAILURE_SECONDS)

    def _outcome(self, stop: Stop | None) -> Outcome:
        """Returns the outcome; the cause may have appeared while the processes were being ended."""
        codes = {child.code for child in self._required_children}
        code, *other_codes = codes
        if stop and code is not None and not other_codes and code <= SIGNAL_OFFSET:
            if stop.is_requested or code == ExitCode.PREEMPTED:
                return Outcome(code, f"all ranks ended with {describe_code(code)}" if code else "")
        if codes == {ExitCode.DONE, ExitCode.PREEMPTED}:
            rank = next(child.rank for child in self._required_children if child.code == ExitCode.PREEMPTED)
            return Outcome(ExitCode.PREEMPTED, f"rank {rank} ended with {describe_code(ExitCode.PREEMPTED)}", rank)
        cause = self._cause()
        if stop and cause.code in (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.PEER_LOST):
            # A request may have arrived during a resize, before all processes had saved.
            requests = [check() for check in self._stops] if stop.outcome.code == ExitCode.PREEMPTED else []
            return next((request for request in requests if request and request.is_final), stop).outcome
        return cause

    @property
    def _loss(self) -> LostMember | None:
        return self._server.loss if self._server else None

    def _cause(self) -> Outcome:
        return root_cause(self._required_children, self._loss)

    @property
    def _required_children(self) -> Sequence[Child]:
        """All processes except for lost ones without which the job continues."""
        expendable_ranks = self._server.tolerated_members if self._server else ()
        return [c for c in self._children if c.code in (None, *_PLANNED_CODES) or c.rank not in expendable_ranks]

    def _all_ended(self, with_evaluator: bool = False) -> bool:
        return all(child.poll() for child in (self._all_children if with_evaluator else self._children))

    def _poll_evaluator(self) -> None:
        evaluator = self._evaluator
        if evaluator and evaluator.poll() and not self._has_evaluator_ended:
            self._has_evaluator_ended = True
            if evaluator.code and not evaluator.signaled:
                self._host.say(
                    f"the evaluator ended with {describe_code(evaluator.code)}; training continues without it. Its log: "
                    f"{evaluator.log}"
                )

    def _signal(self, number: int) -> None:
        for child in self._all_children:
            child.signal(number)

    def _wait_until(self, condition: Callable[[], object], seconds: float = float("inf")) -> None:
        end = time.monotonic() + seconds
        while True:
            self._poll_evaluator()
            departed_members = self._server.departed_members if self._server else ()
            for child in self._children:
                if not child.poll() and child.rank in departed_members:  # it is suspended, and cannot rejoin the job
                    child.signal(signal.SIGKILL)
            if condition() or time.monotonic() > end:
                return
            self._forward_output()

    def _forward_remaining_output(self) -> None:
        """Forwards the remaining output for a limited time, because a process outside its group may keep a pipe open."""
        end = time.monotonic() + REMAINING_OUTPUT_SECONDS
        while self._selector.get_map() and time.monotonic() < end:
            self._forward_output()
        for key in self._selector.get_map().values():
            key.fileobj.close()  # type: ignore[union-attr]  # a Channel
        self._selector.close()

    def _forward_output(self) -> None:
        if not self._selector.get_map():  # all processes have closed their output
            time.sleep(POLL_SECONDS)
            return
        for key, _ in self._selector.select(POLL_SECONDS):
            channel = key.fileobj
            assert isinstance(channel, Channel)
            if not channel.forward():
                self._selector.unregister(channel)
                channel.close()
