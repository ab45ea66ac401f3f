"""Controls a job: which launchers run how many processes, restarts, and when the job is over."""

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfdist.errors import ExitCode, exceptions
from tfdist.launcher import orders
from tfdist.launcher.child import REAP_SECONDS
from tfdist.launcher.hosts import is_named
from tfdist.launcher.job import SUCCESS, Job, Outcome
from tfdist.launcher.orders import Order, OrderKind, Report

LONGEST_REJOIN_SECONDS = 3600.0


class Slots:
    """The slots of one host in an elastic job.

    The first failure disables a slot for `rejoin_seconds`, each further one for twice as long, up to an hour, so that a
    broken host is retried less and less often. After an hour with all slots enabled the delay is reset. If the host
    list changes the number of slots, the host has presumably been repaired, and all slots are enabled again.
    """

    def __init__(self, rejoin_seconds: float):
        """Initializes with `rejoin_seconds`: how long the first slot is disabled; 0 for not at all, inf forever."""
        self._first = self._pause = rejoin_seconds
        self._offered: int | None = None
        self._out: list[float] = []  # when each disabled slot comes back
        self._whole = -math.inf  # since when all slots are enabled

    def offer(self, count: int) -> None:
        """Sets the number of slots of the host."""
        if count != self._offered and self._offered is not None:
            self._out = []
        self._offered = count

    @property
    def offered(self) -> int:
        """Number of slots of the host, including disabled ones."""
        return self._offered or 0

    def died(self, count: int, now: float) -> None:
        """Disables the slots of `count` failed processes."""
        if not count:
            return
        if now - self._whole > LONGEST_REJOIN_SECONDS:
            self._pause = self._first
        self._out += [now + self._pause] * count
        self._whole = max(self._whole, now + self._pause)
        self._pause = max(self._pause, min(2 * self._pause, LONGEST_REJOIN_SECONDS))

    def free(self, now: float) -> int:
        """Returns how many processes the host may run."""
        self._out = [back for back in self._out if back > now]
        return max(0, self.offered - len(self._out))


LONGEST_BACKOFF_SECONDS = 60.0
MAX_EARLY_FAILURES = 5  # failures in a row before training began; some may be due to the network or a host that is late
MAX_LATER_FAILURES = 15  # in a row after training began; with the delays, an outage of ten minutes is tolerated
# A finished job is done; bad input stays bad; a loss that is not finite recurs, because a resumed run repeats its
# steps.
FINAL = frozenset({ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NOT_FINITE})

# SIGTERM counts because only schedulers send it, perhaps to a process that cannot save yet or has already saved.
PREEMPTIONS = frozenset({ExitCode.PREEMPTED, exceptions.SIGNALLED + signal.SIGTERM})


class Decision(NamedTuple):
    """What follows the end of an attempt.

    Attributes:
      wait: seconds until the next attempt; None if there is none.
      reason: why, as the end of a sentence; empty if no explanation is needed.
    """

    wait: float | None
    reason: str = ""


class Restarts:
    """Counts a job's restarts after failures and after preemptions, each with its own budget.

    A repeated failure is not retried: two attempts in a row that fail after the same step, which is the last one that a
    rank has recorded in its `tfdist.cluster.progress_file`. Without a recorded step, training has not begun, or the
    program records nothing. Then the budget decides; if it is unlimited, `MAX_EARLY_FAILURES` failures in a row count as a
    repeated failure, or `MAX_LATER_FAILURES` if training had begun before.
    """

    def __init__(self, job: Job):
        """Initializes with a `job`, which has the budgets and the first pause."""
        self._job = job
        self._failures = self._preemptions = 0
        self._failed_after: int | None = None
        self._early_failures = self._left_early = 0  # failures, and preemptions, in a row before training began
        self._most = MAX_EARLY_FAILURES

    def decide(self, outcome: Outcome, step: int | None, *, may_repeat: bool = True, final: bool = False) -> Decision:
        """Decides what follows the end of an attempt, and counts it.

        Args:
          outcome: outcome of the attempt.
          step: last step that any rank has recorded in it; None if none has.
          may_repeat: whether the same end once more would be a repeated failure.
          final: whether a rank has recorded that the job must not be restarted.
        """
        if outcome.code in FINAL:
            return Decision(None)
        if final:
            return Decision(None, "the saved state may be wrong, too, so the job is not restarted")
        if step is not None:
            self.begun()
        # With code 75 the program itself requests a restart; after a SIGTERM it does not.
        counts = step is None and may_repeat and outcome.code != ExitCode.PREEMPTED
        self._early_failures += counts
        is_vain = counts and self._early_failures >= self._most
        if outcome.code in PREEMPTIONS:
            return self._after_preemption(step, is_vain)
        return self._after_failure(step, may_repeat, is_vain)

    def resized(self) -> None:
        """Records that the attempt was stopped to change the number of processes, which is not a failure."""
        self._failed_after = None

    def begun(self) -> None:
        """Records that training has begun, which resets the count of failures before training."""
        self._early_failures = self._left_early = 0
        self._most = MAX_LATER_FAILURES

    def _after_preemption(self, step: int | None, is_vain: bool) -> Decision:
        self._failed_after = None
        budget = self._job.preemption_budget
        if self._preemptions == budget:
            return _used_up(self._preemptions, "max_preemptions")
        if is_vain and budget == math.inf:
            return self._given_up("max_preemptions")
        pause = max(self._job.restart_backoff_seconds, self._pause(self._left_early))
        self._preemptions += 1
        self._left_early += step is None
        return Decision(pause, f"restart {self._preemptions}{_of(budget)} after preemptions")

    def _after_failure(self, step: int | None, may_repeat: bool, is_vain: bool) -> Decision:
        before, self._failed_after = self._failed_after, step if may_repeat else None
        budget = self._job.restart_budget
        if self._failures == budget:
            return _used_up(self._failures, "max_restarts")
        if may_repeat and step is not None and step == before:
            return Decision(None, f"the second failure in a row after step {step}, so the job is not restarted")
        if is_vain and budget == math.inf:
            return self._given_up("max_restarts")
        pause = self._pause(self._failures)
        self._failures += 1
        after = "" if step is None else f" after step {step}"
        return Decision(pause, f"restart {self._failures}{_of(budget)}{after}")

    def _given_up(self, flag: str) -> Decision:
        what = "began" if self._most == MAX_EARLY_FAILURES else "made progress"
        before = f"{self._early_failures} failures in a row before training {what}"
        return Decision(None, f"{before}, so the job is not restarted; --{flag}=N sets another limit")

    def _pause(self, before: int) -> float:
        return min(LONGEST_BACKOFF_SECONDS, self._job.restart_backoff_seconds * 2 ** min(before, 30))


def _of(budget: float) -> str:
    return "" if budget == math.inf else f" of {budget:g}"


def _used_up(count: int, flag: str) -> Decision:
    return Decision(None, f"--{flag}={count} is used up" if count else "")


_SUSPENDED_SECONDS = 5.0  # between two polls if this process was suspended; launchers poll many times a second
SURELY_BEGUN_SECONDS = 3600.0  # after which training is assumed to have begun, even without recorded steps

# Exit codes that are least likely to be the cause, least likely first.
_LEAST_SPECIFIC = (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.PEER_LOST)


@dataclasses.dataclass
class AttemptState:
    """State of a running attempt.

    Attributes:
      number: number of the attempt in its job.
      processes: number of processes of each launcher, in the order of ranks.
      address: where the launchers' group is served.
      purpose: from which, with the job's token, that group's token is derived.
      since: time at which it began.
      reports: reports of launchers whose processes have ended.
      stops: why it was ordered to stop; None if it was not.
      ends: time since which all of its processes have to end; None if they have not.
      polled: time of the last poll since then.
      awake: seconds since then, except while this process was suspended.
    """

    number: int
    processes: dict[str, int]
    address: str
    purpose: str
    since: float
    reports: dict[str, Report] = dataclasses.field(default_factory=dict)
    stops: Outcome | None = None
    ends: float | None = None
    polled: float = 0.0
    awake: float = 0.0

    @property
    def size(self) -> int:
        """Total number of processes."""
        return sum(self.processes.values())

    @property
    def awaited(self) -> list[str]:
        """Launchers that have not reported."""
        return [name for name in self.processes if name not in self.reports]

    def overdue(self, now: float) -> float:
        """Returns for how many seconds all processes have had to end; -inf if they have not.

        They have to end if the attempt was ordered to stop, or if a launcher failed or was asked to end. A launcher
        whose processes end with code 0 or 75 does not notify the others, whose processes end when they like. To be
        polled, because the first call that detects the condition starts the time.
        """
        if self.ends is None and (self.stops or any(map(_ends_all, self.reports.values()))):
            self.ends = self.polled = now
        self.awake += min(now - self.polled, _SUSPENDED_SECONDS) if self.ends is not None else 0.0
        self.polled = now
        return -math.inf if self.ends is None else now - self.ends

    @property
    def step(self) -> int | None:
        """Last step that any rank has recorded, or None."""
        return max((report.step for report in self.reports.values() if report.step is not None), default=None)

    def has_begun(self, now: float) -> bool:
        """Returns whether training has begun."""
        return self.step is not None or now - self.since >= SURELY_BEGUN_SECONDS

    @property
    def is_final(self) -> bool:
        """Whether a rank has recorded that the job must not be restarted."""
        return any(report.final for report in self.reports.values())

    def cause(self) -> Outcome:
        """Returns the launchers' outcome that most likely caused the others, preferring one that names a rank."""
        outcomes = [report.outcome for report in self.reports.values()]
        if self.awaited:
            outcomes.append(loss_of(self.awaited))
        return max(outcomes, key=_says, default=SUCCESS)


def loss_of(launchers: Sequence[str]) -> Outcome:
    """Returns the outcome of an attempt whose launchers are lost."""
    return Outcome(ExitCode.PEER_LOST, f"{', '.join(launchers)} is lost")


def _ends_all(report: Report) -> bool:
    return report.stopped or report.outcome.code not in (ExitCode.DONE, ExitCode.PREEMPTED)


def _says(outcome: Outcome) -> tuple[int, bool]:
    code = outcome.code
    return _LEAST_SPECIFIC.index(ExitCode(code)) if code in _LEAST_SPECIFIC else len(
        _LEAST_SPECIFIC
    ), outcome.rank is not None


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
        return not (is_smaller and exceptions.is_loss(cause.code))

    def _shrinks(self, attempt: AttemptState, cause: Outcome, now: float) -> bool:
        """Disables the slots of failed processes; returns whether any were disabled or a launcher is lost.

        If all processes failed, no single one is to blame, and no slot is disabled. Launchers with which nothing has
        begun lose all their slots: a host that hangs at startup, or that the others cannot reach, must not stop them
        each time.
        """
        if not self._job.is_elastic:
            return False
        dead = orders.by_launcher(attempt.processes, attempt.reports)
        if sum(dead.values()) == attempt.size:
            dead = {}
        dead |= {name: self._members[name].slots.offered for name in self._idle(attempt, cause)}
        for name, count in dead.items():
            if name in self._members:
                self._members[name].slots.died(count, now)
        return any(dead.values()) or len(attempt.reports) < len(attempt.processes)


def _log_of(cause: Outcome) -> str:
    return f" Its log: {cause.log}." if cause.log else ""
