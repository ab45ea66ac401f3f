"""Controls a job: which launchers run how many processes, when they stop, and when the job is over."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.errors import ExitCode, exit_codes
from tfdist.launcher import failure_counts
from tfdist.launcher.attempt_state import AttemptState, loss_of
from tfdist.launcher.child import REAP_SECONDS
from tfdist.launcher.hosts import is_named
from tfdist.launcher.job import Job
from tfdist.launcher.job_result import Outcome
from tfdist.launcher.orders import Order, OrderKind, Report
from tfdist.launcher.restarts import FINAL, PREEMPTIONS, Restarts
from tfdist.launcher.slots import Slots

SETTLE_SECONDS = 2.0  # to wait for more launchers before a job on several hosts begins or grows
_MESSAGE_SECONDS = 30.0  # for orders and reports to arrive, and for an attempt's servers to close

_RESIZED = Outcome(ExitCode.PREEMPTED, "the processes stop so that the job can be resized")

# Opens the group of some launchers; returns its address and the purpose from which its token is derived.
OpenGroup = Callable[[Sequence[str]], tuple[str, str]]


@dataclasses.dataclass
class _Member:
    """A launcher that has joined the job.

    Attributes:
      places: names of its host.
      slots: how many processes it may run.
    """

    places: Sequence[str]
    slots: Slots


class JobController:
    """Controls all launchers of a job, which poll it for orders and send it reports.

    The first launcher owns the job: when it is asked to end, the job is over. Any other launcher just leaves.

    A job that is not elastic has one launcher and always runs all its processes. An elastic job runs as many processes
    as there are slots, up to `processes`, and waits while there are fewer than `min_processes`. When a process fails,
    its slot is disabled for a while (see `Slots`), and the remaining ones continue. When slots are added or removed,
    all processes are stopped so that they save, and are started again. Only checkpoints carry state from one attempt to
    the next.

    A launcher that joined later and with which the processes end with a bad-input error, because its program differs,
    is refused, and the others continue. If a larger number of processes ends that way where a smaller one has trained,
    that number is not tried again. A launcher that stays connected but does not report long after its processes had to
    end is lost: it hangs, as if its disk did not answer. If the first one hangs, the job is over for the others.

    Attributes:
      open_group: serves the group of an attempt's launchers if there are several; to be set where that is possible.
      close_group: closes that group for launchers that still wait for others.
    """

    def __init__(
        self,
        job: Job,
        say: Callable[[str], object],
        listed: Callable[[], Mapping[str, int] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        launched: str = "",
    ):
        """Initializes without any launcher.

        Args:
          job: number of processes, and restart budgets.
          say: called with messages about the job.
          listed: returns the slots by host, as `Hosts.slots`; None if every launcher may run all processes.
          clock: returns the time in seconds.
          launched: see `Order`.
        """
        self._job, self._say, self._listed, self._clock, self._launched = job, say, listed, clock, launched
        self.open_group: OpenGroup = lambda names: ("", "")
        self.close_group: Callable[[], object] = lambda: None
        self._least = job.min_processes or job.processes
        self._restarts = Restarts(job)
        # A process that has to end may still be starting or saving before it is killed.
        self._patience = job.start_timeout_seconds + job.grace_seconds + REAP_SECONDS + _MESSAGE_SECONDS
        self._lock = threading.RLock()
        self._members: dict[str, _Member] = {}  # in the order in which they joined
        self._first = ""
        self._fit: set[str] = set()  # launchers whose processes have trained
        self._trained = 0  # the largest number of processes that have trained together
        self._most = job.processes
        self._refused: dict[str, Outcome] = {}
        self._known: dict[tuple[str, ...], Slots] = {}  # of lost or refused hosts, in case they join again
        self._lines: tuple[object, dict[str, int]] = (None, {})  # the last result of `_offered`, which is called often
        self._attempt: AttemptState | None = None
        self._number = 0  # of the next attempt
        self._not_before = 0.0
        self._short_since: float | None = None
        self._planned: tuple[dict[str, int], float] = ({}, 0.0)  # the last plan, and since when it is unchanged
        self._over: Outcome | None = None

    def joined(self, name: str, places: Sequence[str]) -> None:
        """Adds a launcher; `places` are the names of its host."""
        with self._lock:
            if self._members:
                self._say(f"{name} has joined.")
            self._first = self._first or name
            slots = self._known.pop(tuple(places), None)
            self._members[name] = _Member(places, slots or Slots(self._job.rejoin_seconds))

    def left(self, name: str, reason: str = "") -> None:
        """Removes a launcher, whose report is no longer awaited; logs the reason unless it is empty."""
        with self._lock:
            if self._members.pop(name, None) and reason:
                self._say(f"{name} {reason}.")

    def lost(self, name: str, reason: str) -> None:
        """Removes a launcher that was lost, and disables its host's slots for a while, as after failed processes.

        A host that repeatedly joins and gets lost must not stop the others each time.
        """
        with self._lock:
            if member := self._members.get(name):
                member.slots.died(member.slots.offered, self._clock())
                self._known[tuple(member.places)] = member.slots
            self.left(name, reason)

    def reported(self, name: str, report: Report) -> None:
        """Records that a launcher's processes have ended."""
        with self._lock:
            if self._attempt and name in self._attempt.processes:
                self._attempt.reports[name] = report

    def end(self, outcome: Outcome, at_once: bool = False) -> None:
        """Requests the end of the job; running processes are stopped first, without waiting for them if `at_once`."""
        with self._lock:
            self._over = self._over or outcome
            self._patience = 0.0 if at_once else self._patience

    def order(self, name: str) -> Order:
        """Returns the current order for a launcher."""
        with self._lock:
            self._advance()
            attempt = self._attempt
            if attempt and name in attempt.processes and name not in attempt.reports:
                return self._order_in(attempt, name)
            over = self._refused.get(name) or (None if attempt else self._over)
            return Order(OrderKind.OVER, outcome=over) if over else Order(OrderKind.WAIT)

    def _order_in(self, attempt: AttemptState, name: str) -> Order:
        if attempt.stops:
            return Order(OrderKind.STOP, attempt.number, outcome=attempt.stops)
        names = list(attempt.processes)
        return Order(
            OrderKind.RUN,
            attempt.number,
            names.index(name),
            len(names),
            attempt.processes[name],
            attempt.address,
            attempt.purpose,
            launched=self._launched,
        )

    def _advance(self) -> None:
        now, attempt = self._clock(), self._attempt
        if attempt and attempt.overdue(now) >= self._patience:
            self._give_up(attempt)
        if attempt and not any(name in self._members for name in attempt.awaited):
            self._conclude(now)
        free = self._free(now)
        if self._attempt:
            self._stop(self._attempt, free, now)
        elif not self._over and now >= self._not_before:
            self._begin(self._plan(free) or self._plan(self._needed()), now)

    def _give_up(self, attempt: AttemptState) -> None:
        """Gives up awaited launchers; without the first one, which may have been suspended, or hang, the job is over."""
        reason = "has not said how its processes ended"
        for name in attempt.awaited:
            if name in self._members and name != self._first:
                self._refused[name] = Outcome(ExitCode.PEER_LOST, f"this launcher {reason}")
                self.lost(name, reason)
        if self._first in attempt.awaited and attempt.awake >= self._patience:
            self._over = self._over or Outcome(ExitCode.PEER_LOST, f"the coordinator's launcher {reason}")
            self._attempt = None

    def _stop(self, attempt: AttemptState, free: Mapping[str, int], now: float) -> None:
        """Orders an attempt to stop, once, if necessary."""
        if attempt.stops:
            return
        lost = [name for name in attempt.awaited if name not in self._members]
        if lost:  # its peers wait for it in vain
            attempt.stops = loss_of(lost)
        elif self._over:
            attempt.stops = self._over
        elif self._is_other(attempt.processes, free, now):
            attempt.stops = _RESIZED
        if attempt.stops and len(attempt.processes) > 1:
            self.close_group()

    def _free(self, now: float) -> dict[str, int]:
        """Returns how many processes each launcher may run."""
        listed = self._listed()
        offered = dict.fromkeys(self._members, self._job.processes) if listed is None else self._offered(listed)
        for name, member in self._members.items():
            member.slots.offer(offered[name])
        return {name: member.slots.free(now) for name, member in self._members.items()}

    def _needed(self) -> dict[str, int]:
        """Returns how many processes each launcher could run including disabled slots.

        Used if the remaining slots are too few, when waiting would not help. Empty if disabled slots never come back.
        """
        comes_back = math.isfinite(self._job.rejoin_seconds)
        return {name: member.slots.offered for name, member in self._members.items()} if comes_back else {}

    def _offered(self, listed: Mapping[str, int]) -> dict[str, int]:
        """Returns the slots of each launcher.

        If a line matches several launchers on one host, it goes to the one with the fewest lines.
        """
        asked = listed, list(self._members)
        if asked == self._lines[0]:
            return self._lines[1]
        lines: dict[str, list[int]] = {name: [] for name in self._members}
        for line, slots in listed.items():
            named = [name for name, member in self._members.items() if is_named(line, list(member.places))]
            if named:
                lines[min(named, key=lambda name: len(lines[name]))].append(slots)
        self._lines = asked, {name: sum(slots) for name, slots in lines.items()}
        return self._lines[1]

    def _plan(self, free: Mapping[str, int]) -> dict[str, int]:
        """Returns how many processes each launcher would run; empty if they are too few."""
        plan, left = {}, self._most
        for name, count in free.items():
            if count and left:
                plan[name] = min(count, left)
                left -= plan[name]
        return plan if sum(plan.values()) >= self._least else {}

    def _is_other(self, running: Mapping[str, int], free: Mapping[str, int], now: float) -> bool:
        """Returns whether the attempt must stop because it uses a removed slot, or because more processes could run.

        The latter must have been possible for some time.
        """
        if not self._job.is_elastic:
            return False
        if any(count > self._members[name].slots.offered for name, count in running.items() if name in self._members):
            return True
        plan = self._plan(free)
        return self._is_settled(plan, now) and sum(plan.values()) > sum(running.values())

    def _is_settled(self, plan: dict[str, int], now: float) -> bool:
        if plan != self._planned[0]:
            self._planned = plan, now
        several = self._job.is_elastic and self._job.coordinator
        return now - self._planned[1] >= (SETTLE_SECONDS if several else 0.0)

    def _begin(self, plan: dict[str, int], now: float) -> None:
        if not plan:
            self._wait_for_more(now)
            return
        if not self._number and not self._is_settled(plan, now):
            return
        self._short_since = None
        address, purpose = self.open_group(list(plan)) if len(plan) > 1 else ("", "")
        if self._job.is_elastic and self._number:
            self._say(f"Attempt {self._number}: {sum(plan.values())} processes.")
        self._attempt = AttemptState(self._number, plan, address, purpose, now)
        self._number += 1

    def _wait_for_more(self, now: float) -> None:
        limit = self._job.elastic_timeout_seconds
        if self._short_since is None:
            self._short_since = now
            self._say(
                f"Waiting for processes: {sum(self._free(now).values())} can run, at least {self._least} are needed"
                + (f"; giving up in {limit:g} s." if limit else ".")
            )
        elif limit and now - self._short_since > limit:
            reason = f"fewer than {self._least} processes could run for {limit:g} s (--elastic_timeout_seconds)"
            self._over = Outcome(ExitCode.PEER_LOST, reason)

    def _conclude(self, now: float) -> None:
        """Ends an attempt whose launchers have all reported or left."""
        attempt, self._attempt = self._attempt, None
        assert attempt
        cause = attempt.cause()
        leave = [name for name, report in attempt.reports.items() if report.stopped]
        if cause.code == ExitCode.DONE or self._over or self._first in leave:
            done = cause.code in (ExitCode.DONE, ExitCode.PREEMPTED)
            self._over = cause if done else self._over or cause
            return
        for name in leave:
            self.left(name, "was asked to stop, and has left the job")
        if attempt.has_begun(now):
            self._restarts.begun()
        if cause.code != ExitCode.BAD_INPUT and attempt.step is not None:
            self._fit.update(attempt.processes)
            self._trained = max(self._trained, attempt.size)
        if misfits := self._misfits(attempt, cause):
            self._refuse(misfits, cause, now)
        elif cause.code == ExitCode.BAD_INPUT and 0 < self._trained < attempt.size:
            self._keep_to(self._trained, attempt, cause)
        elif (attempt.stops == _RESIZED or leave) and cause.code not in FINAL and not attempt.is_final:
            self._restarts.resized()
        else:
            self._after(attempt, cause, now)

    def _keep_to(self, size: int, attempt: AttemptState, cause: Outcome) -> None:
        """Limits the job to a size that worked before.

        The larger size is not allowed by its flags, for example because the batch cannot be split among so many.
        """
        self._most = size
        self._restarts.resized()
        self._say(f"{cause.reason}.{_log_of(cause)} {attempt.size} processes are too many: at most {size} from now on.")

    def _misfits(self, attempt: AttemptState, cause: Outcome) -> list[str]:
        """Returns the new launchers that cause a bad-input error, if others have trained before."""
        untrained = self._never_trained(attempt) if cause.code == ExitCode.BAD_INPUT else []
        return [name for name in untrained if name != self._first]

    def _never_trained(self, attempt: AttemptState) -> list[str]:
        """Returns the launchers whose processes have never trained, if those of others have."""
        if self._fit.isdisjoint(attempt.processes):
            return []
        return [name for name in attempt.processes if name not in self._fit]

    def _idle(self, attempt: AttemptState, cause: Outcome) -> list[str]:
        """Returns the connected launchers that have never trained, if training has not begun and nothing was preempted."""
        if attempt.step is not None or cause.code in PREEMPTIONS:
            return []
        return [name for name in self._never_trained(attempt) if name in self._members]

    def _refuse(self, misfits: Sequence[str], cause: Outcome, now: float) -> None:
        for name in misfits:  # some may have left already
            self._refused[name] = cause
            self.lost(name, f"does not match the others, and is refused: {cause.reason}")
        self._restarts.resized()
        if not self._plan(self._free(now)):  # no launcher can train until another one joins
            self._not_before = now + self._job.restart_backoff_seconds

    def _after(self, attempt: AttemptState, cause: Outcome, now: float) -> None:
        """Decides whether to retry after a failure, or after a preemption that was not requested here."""
        shrinks = self._shrinks(attempt, cause, now)
        plan = self._plan(self._free(now)) if shrinks else {}
        may_repeat = self._may_repeat(plan, attempt, cause)
        decision = self._restarts.decide(cause, attempt.step, may_repeat=may_repeat, final=attempt.is_final)
        if decision.wait is None:
            reason = "; ".join(filter(None, (cause.reason, decision.reason)))
            self._over = dataclasses.replace(cause, reason=reason)
            return
        if spared := [name for name in self._idle(attempt, cause) if plan and name not in plan]:
            self._say(f"No training has begun with {', '.join(spared)}: the others continue without it for a while.")
        wait = 0.0 if plan else decision.wait
        when = f"In {wait:g} s" if wait else "At once"
        self._say(f"{cause.reason}.{_log_of(cause)} {when}: {decision.reason}.")
        self._not_before = now + wait

    def _may_repeat(self, plan: Mapping[str, int], attempt: AttemptState, cause: Outcome) -> bool:
        """Returns whether the same end once more would count as a repeated failure.

        Signals before the first step do not count while the job continues with fewer processes or without a lost host.
        With the same number of processes they do, because whatever kills them will do so again. Before training has
        begun, nothing counts as long as slots are being disabled and the remaining ones are enough: a broken host fails
        at each start until it is excluded. Lost peers do not count then either, because their cause is the network, or
        an unstable host.
        """
        if attempt.step is None:
            goes_without = bool(plan) and self._job.rejoin_seconds > 0
            return not goes_without and cause.code != ExitCode.PEER_LOST
        is_lost = len(attempt.reports) < len(attempt.processes)
        is_smaller = bool(plan) and (is_lost or sum(plan.values()) < attempt.size)
        return not (is_smaller and exit_codes.is_loss(cause.code))

    def _shrinks(self, attempt: AttemptState, cause: Outcome, now: float) -> bool:
        """Disables the slots of failed processes; returns whether any were disabled or a launcher is lost.

        If all processes failed, no single one is to blame, and no slot is disabled. Launchers with which nothing has
        begun lose all their slots: a host that hangs at startup, or that the others cannot reach, must not stop them
        each time.
        """
        if not self._job.is_elastic:
            return False
        dead = failure_counts.by_launcher(attempt.processes, attempt.reports)
        if sum(dead.values()) == attempt.size:
            dead = {}
        dead |= {name: self._members[name].slots.offered for name in self._idle(attempt, cause)}
        for name, count in dead.items():
            if name in self._members:
                self._members[name].slots.died(count, now)
        return any(dead.values()) or len(attempt.reports) < len(attempt.processes)


def _log_of(cause: Outcome) -> str:
    return f" Its log: {cause.log}." if cause.log else ""
