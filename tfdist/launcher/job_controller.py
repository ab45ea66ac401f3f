"""Who decides: which launchers of a job run how many processes, when they stop, and when the job is over."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.errors import ExitCode, exit_codes
from tfdist.launcher import failures
from tfdist.launcher.attempt_state import AttemptState, loss_of
from tfdist.launcher.child import REAP_SECONDS
from tfdist.launcher.hosts import is_named
from tfdist.launcher.job import Job
from tfdist.launcher.orders import Kind, Order, Report
from tfdist.launcher.outcome import Outcome
from tfdist.launcher.restarts import FINAL, PREEMPTIONS, Restarts
from tfdist.launcher.slots import Slots

SETTLE_SECONDS = 2.0  # for more launchers to come, before a job on several hosts begins, or grows
_WORD_SECONDS = 30.0  # for orders and reports on their way, and for what an attempt serves to be closed

_RESIZED = Outcome(ExitCode.PREEMPTED, "the processes stop so that others can join them, or leave")

Meet = Callable[[Sequence[str]], tuple[str, str]]  # launchers -> where they meet, and what they show there


@dataclasses.dataclass
class _Member:
    """A launcher that is there.

    Attributes:
      places: what its host may be called.
      slots: how many processes it may run.
    """

    places: Sequence[str]
    slots: Slots


class JobController:
    """Decides for all launchers of a job; each asks it for orders, and reports.

    Attributes:
      meet: lets the launchers of an attempt meet, when there are several; to be set where there may be.
      part: ends that, for those that still wait for the others.

    The first launcher is the job's own: the job is over when that one is asked to end. Any other one leaves then.

    A job that is not elastic has one launcher, and as many processes as it wants. An elastic one runs as many as there are
    slots for, up to `processes`: with fewer than `min_processes` it waits. When a process dies, its slot is out for a
    while (see `Slots`), and those that are there go on; when slots come or go, all are stopped so that they save, and
    start again. What an attempt leaves of the job is the checkpoints' affair. A launcher that comes later, and with which the
    processes end by bad input, as its program is another one, is refused, and the others go on; a number of processes that ends
    so, where fewer have trained, is not tried again. A launcher that is there, and does not say how its processes ended, long
    after they had to, hangs, as its disk does not answer: it is lost.
    """

    def __init__(
        self,
        job: Job,
        say: Callable[[str], object],
        listed: Callable[[], Mapping[str, int] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        launched: str = "",
    ):
        """Nobody is there yet.

        Args:
          job: how many processes, and how often they are started again.
          say: told what becomes of the job.
          listed: the slots by host, as `Hosts.slots`; None where every launcher may run all processes.
          clock: in seconds.
          launched: see `Order`.
        """
        self._job, self._say, self._listed, self._clock, self._launched = job, say, listed, clock, launched
        self.meet: Meet = lambda names: ("", "")
        self.part: Callable[[], object] = lambda: None
        self._least = job.min_processes or job.processes
        self._restarts = Restarts(job)
        # Who has to end is still in the start, or saves, and is then killed.
        self._patience = job.start_timeout_seconds + job.grace_seconds + REAP_SECONDS + _WORD_SECONDS
        self._lock = threading.RLock()
        self._members: dict[str, _Member] = {}  # in the order in which they came
        self._first = ""
        self._fit: set[str] = set()  # the launchers whose processes have trained
        self._trained = 0  # the largest number of processes that have
        self._most = job.processes
        self._refused: dict[str, Outcome] = {}
        self._known: dict[tuple[str, ...], Slots] = {}  # of hosts that were lost or refused, for when they come again
        self._lines: tuple[object, dict[str, int]] = (None, {})  # the last answer of `_offered`, which is asked often
        self._attempt: AttemptState | None = None
        self._number = 0  # of the next attempt
        self._not_before = 0.0
        self._short_since: float | None = None
        self._planned: tuple[dict[str, int], float] = ({}, 0.0)  # the last plan, and since when
        self._over: Outcome | None = None

    def joined(self, name: str, places: Sequence[str]) -> None:
        """A launcher has come; `places` are what its host may be called."""
        with self._lock:
            if self._members:
                self._say(f"{name} has come.")
            self._first = self._first or name
            slots = self._known.pop(tuple(places), None)
            self._members[name] = _Member(places, slots or Slots(self._job.rejoin_seconds))

    def left(self, name: str, reason: str = "") -> None:
        """A launcher is gone, with its processes; whoever waits for its report does so no more."""
        with self._lock:
            if self._members.pop(name, None) and reason:
                self._say(f"{name} {reason}.")

    def lost(self, name: str, reason: str) -> None:
        """A launcher is gone without a word; its host's slots are out for a while, as those of processes that died.

        If it comes again and again, it must not stop the others each time.
        """
        with self._lock:
            if member := self._members.get(name):
                member.slots.died(member.slots.offered, self._clock())
                self._known[tuple(member.places)] = member.slots
            self.left(name, reason)

    def reported(self, name: str, report: Report) -> None:
        """A launcher's processes have ended."""
        with self._lock:
            if self._attempt and name in self._attempt.processes:
                self._attempt.reports[name] = report

    def end(self, outcome: Outcome, at_once: bool = False) -> None:
        """Somebody wants the job to end; what runs is stopped first, and, if it has to be at once, not waited for."""
        with self._lock:
            self._over = self._over or outcome
            self._patience = 0.0 if at_once else self._patience

    def order(self, name: str) -> Order:
        """What a launcher is to do now."""
        with self._lock:
            self._advance()
            attempt = self._attempt
            if attempt and name in attempt.processes and name not in attempt.reports:
                return self._order_in(attempt, name)
            over = self._refused.get(name) or (None if attempt else self._over)
            return Order(Kind.OVER, outcome=over) if over else Order(Kind.WAIT)

    def _order_in(self, attempt: AttemptState, name: str) -> Order:
        if attempt.stops:
            return Order(Kind.STOP, attempt.number, outcome=attempt.stops)
        names = list(attempt.processes)
        return Order(
            Kind.RUN,
            attempt.number,
            names.index(name),
            len(names),
            attempt.processes[name],
            attempt.address,
            attempt.token,
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
        """Whoever is awaited is lost; but not the first launcher, which is this very process and may have been stopped."""
        reason = "has not said how its processes ended"
        for name in attempt.awaited:
            if name in self._members and name != self._first:
                self._refused[name] = Outcome(ExitCode.PEER_LOST, f"this launcher {reason}")
                self.lost(name, reason)

    def _stop(self, attempt: AttemptState, free: Mapping[str, int], now: float) -> None:
        """Tells an attempt to stop, once, if it has to."""
        if attempt.stops:
            return
        lost = [name for name in attempt.awaited if name not in self._members]
        if lost:  # whoever talks to its processes waits in vain
            attempt.stops = loss_of(lost)
        elif self._over:
            attempt.stops = self._over
        elif self._is_other(attempt.processes, free, now):
            attempt.stops = _RESIZED
        if attempt.stops and len(attempt.processes) > 1:
            self.part()

    def _free(self, now: float) -> dict[str, int]:
        """How many processes each launcher may run."""
        listed = self._listed()
        offered = dict.fromkeys(self._members, self._job.processes) if listed is None else self._offered(listed)
        for name, member in self._members.items():
            member.slots.offer(offered[name])
        return {name: member.slots.free(now) for name, member in self._members.items()}

    def _needed(self) -> dict[str, int]:
        """How many processes each could run with those slots that are out: where the others are too few, to wait is no use."""
        comes_back = math.isfinite(self._job.rejoin_seconds)
        return {name: member.slots.offered for name, member in self._members.items()} if comes_back else {}

    def _offered(self, listed: Mapping[str, int]) -> dict[str, int]:
        """The slots of each launcher; a line that names several, on one host, is for the one with the fewest lines."""
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
        """Who would run how many; empty if that is too few."""
        plan, left = {}, self._most
        for name, count in free.items():
            if count and left:
                plan[name] = min(count, left)
                left -= plan[name]
        return plan if sum(plan.values()) >= self._least else {}

    def _is_other(self, running: Mapping[str, int], free: Mapping[str, int], now: float) -> bool:
        """Whether what runs is to be stopped, as a slot of it is gone, or more could run; the latter for some time."""
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
        address, token = self.meet(list(plan)) if len(plan) > 1 else ("", "")
        if self._job.is_elastic and self._number:
            self._say(f"Attempt {self._number}: {sum(plan.values())} processes.")
        self._attempt = AttemptState(self._number, plan, address, token, now)
        self._number += 1

    def _wait_for_more(self, now: float) -> None:
        limit = self._job.elastic_timeout_seconds
        if self._short_since is None:
            self._short_since = now
            self._say(
                f"Waits for processes: {sum(self._free(now).values())} can run, at least {self._least} must"
                + (f"; gives up in {limit:g} s." if limit else ".")
            )
        elif limit and now - self._short_since > limit:
            reason = f"fewer than {self._least} processes could run for {limit:g} s (--elastic_timeout_seconds)"
            self._over = Outcome(ExitCode.PEER_LOST, reason)

    def _conclude(self, now: float) -> None:
        """All launchers of the attempt have said how it ended, or are gone."""
        attempt, self._attempt = self._attempt, None
        assert attempt
        cause = attempt.cause()
        leave = [name for name, report in attempt.reports.items() if report.stopped]
        if cause.code == ExitCode.DONE or self._over or self._first in leave:
            done = cause.code in (ExitCode.DONE, ExitCode.PREEMPTED)
            self._over = cause if done else self._over or cause
            return
        for name in leave:
            self.left(name, "was asked to end, and has left the job")
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
        """The job has grown to a size that its flags do not allow: its batch cannot be dealt to so many, say."""
        self._most = size
        self._restarts.resized()
        self._say(f"{cause.reason}.{_log_of(cause)} {attempt.size} processes are too many: at most {size} from now on.")

    def _misfits(self, attempt: AttemptState, cause: Outcome) -> list[str]:
        """The launchers that came last, where others have trained before, and with them nothing begins."""
        strangers = self._strangers(attempt) if cause.code == ExitCode.BAD_INPUT else []
        return [name for name in strangers if name != self._first]

    def _strangers(self, attempt: AttemptState) -> list[str]:
        """The launchers whose processes have never trained, where others have."""
        if self._fit.isdisjoint(attempt.processes):
            return []
        return [name for name in attempt.processes if name not in self._fit]

    def _idle(self, attempt: AttemptState, cause: Outcome) -> list[str]:
        """The strangers that are there, where nothing has begun, and nobody was preempted."""
        if attempt.step is not None or cause.code in PREEMPTIONS:
            return []
        return [name for name in self._strangers(attempt) if name in self._members]

    def _refuse(self, misfits: Sequence[str], cause: Outcome, now: float) -> None:
        for name in misfits:  # some may be gone already
            self._refused[name] = cause
            self.lost(name, f"does not fit the others, and is refused: {cause.reason}")
        self._restarts.resized()
        if not self._plan(self._free(now)):  # and nobody trains until somebody else comes
            self._not_before = now + self._job.restart_backoff_seconds

    def _after(self, attempt: AttemptState, cause: Outcome, now: float) -> None:
        """Tries again, or not, what has failed, or was preempted by somebody else."""
        shrinks = self._shrinks(attempt, cause, now)
        plan = self._plan(self._free(now)) if shrinks else {}
        may_repeat = self._may_repeat(plan, attempt, cause)
        decision = self._restarts.decide(cause, attempt.step, may_repeat=may_repeat, final=attempt.is_final)
        if decision.wait is None:
            reason = "; ".join(filter(None, (cause.reason, decision.reason)))
            self._over = dataclasses.replace(cause, reason=reason)
            return
        if spared := [name for name in self._idle(attempt, cause) if plan and name not in plan]:
            self._say(f"Nothing has begun with {', '.join(spared)}: the others do without for a while.")
        wait = 0.0 if plan else decision.wait
        when = f"In {wait:g} s" if wait else "At once"
        self._say(f"{cause.reason}.{_log_of(cause)} {when}: {decision.reason}.")
        self._not_before = now + wait

    def _may_repeat(self, plan: Mapping[str, int], attempt: AttemptState, cause: Outcome) -> bool:
        """Whether the same end once more would be a failure that repeats.

        Signals that strike one after the other, before a step is made, are none while the job goes on with fewer processes, or
        without a host that is lost. With as many as before they are: whatever kills them, it comes again. Before training has
        begun, nothing is as long as slots go out and the others are enough: a broken host fails at each start, until it is
        done without. Nor are peers that are lost then: that is the network, or a host that comes and goes.
        """
        if attempt.step is None:
            goes_without = bool(plan) and self._job.rejoin_seconds > 0
            return not goes_without and cause.code != ExitCode.PEER_LOST
        is_lost = len(attempt.reports) < len(attempt.processes)
        is_smaller = bool(plan) and (is_lost or sum(plan.values()) < attempt.size)
        return not (is_smaller and (cause.code > exit_codes.SIGNALLED or cause.code == ExitCode.PEER_LOST))

    def _shrinks(self, attempt: AttemptState, cause: Outcome, now: float) -> bool:
        """Takes the slots of those that died; where all have died, it is nobody's own failure, and none is taken.

        Those with which nothing has begun lose all of theirs: a host that hangs as it starts, or that the others do not
        reach, must not stop them each time.
        """
        if not self._job.is_elastic:
            return False
        dead = failures.by_launcher(attempt.processes, attempt.reports)
        if sum(dead.values()) == attempt.size:
            dead = {}
        dead |= {name: self._members[name].slots.offered for name in self._idle(attempt, cause)}
        for name, count in dead.items():
            if name in self._members:
                self._members[name].slots.died(count, now)
        return any(dead.values()) or len(attempt.reports) < len(attempt.processes)


def _log_of(cause: Outcome) -> str:
    return f" Its log: {cause.log}." if cause.log else ""
