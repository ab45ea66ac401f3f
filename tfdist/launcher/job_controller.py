"""Controls a job on all hosts: the number of processes of each launcher, restarts, and the end of the job."""

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

MAX_REJOIN_SECONDS = 3600.0


class Slots:
    """The slots of one host in an elastic job.

    The first failure disables a slot for `rejoin_seconds` (0 for not at all, inf forever), each further one for twice as
    long, up to an hour, so that a broken host is retried less and less often. After an hour with all slots enabled the
    delay is reset. If the host list changes the number of slots, the host has presumably been repaired, and all slots are
    enabled again.
    """

    def __init__(self, rejoin_seconds: float):
        self._first_delay = self._delay = rejoin_seconds
        self._total: int | None = None
        self._disabled_until: list[float] = []  # by disabled slot
        self._all_enabled_since = -math.inf

    def resize(self, total: int) -> None:
        """Sets the number of slots of the host."""
        if total != self._total and self._total is not None:
            self._disabled_until = []
        self._total = total

    @property
    def total(self) -> int:
        """Number of slots of the host, including disabled ones."""
        return self._total or 0

    def disable(self, count: int, now: float) -> None:
        """Disables the slots of `count` failed processes."""
        if not count:
            return
        if now - self._all_enabled_since > MAX_REJOIN_SECONDS:
            self._delay = self._first_delay
        self._disabled_until += [now + self._delay] * count
        self._all_enabled_since = max(self._all_enabled_since, now + self._delay)
        self._delay = max(self._delay, min(2 * self._delay, MAX_REJOIN_SECONDS))

    def enabled(self, now: float) -> int:
        """Returns the number of processes that the host may run."""
        self._disabled_until = [end for end in self._disabled_until if end > now]
        return max(0, self.total - len(self._disabled_until))


MAX_BACKOFF_SECONDS = 60.0
MAX_EARLY_FAILURES = 5  # failures in a row before training began; some may be due to the network or a slow host
MAX_LATER_FAILURES = 15  # in a row after training began; with the delays, an outage of ten minutes is tolerated
# Not restarted: a finished job; bad input; and a training loss that is not finite, as a resumed run repeats its steps.
FINAL = frozenset({ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NOT_FINITE})

# SIGTERM is included because only schedulers send it, perhaps to a process that cannot save yet or has already saved.
PREEMPTIONS = frozenset({ExitCode.PREEMPTED, exceptions.SIGNAL_OFFSET + signal.SIGTERM})


class Decision(NamedTuple):
    """Whether another attempt follows the end of one.

    Attributes:
      wait: seconds until the next attempt; None if there is none.
      reason: explanation, as the end of a sentence; empty if none is needed.
    """

    wait: float | None
    reason: str = ""


class Restarts:
    """Counts a job's restarts after failures and after preemptions, each with its own budget.

    A repeated failure is not retried: two attempts in a row that fail after the same step, which is the last one that a
    rank has recorded in its `tfdist.cluster.progress_file`. Without a recorded step, training has not begun, or the
    program records no progress. Then the budget of the job limits the restarts; if it is unlimited, `MAX_EARLY_FAILURES`
    failures in a row count as a repeated failure, or `MAX_LATER_FAILURES` if training had begun before.
    """

    def __init__(self, job: Job):
        self._job = job
        self._failures = self._preemptions = 0
        self._failed_after: int | None = None
        self._early_failures = self._early_preemptions = 0  # in a row before training began
        self._max_early_failures = MAX_EARLY_FAILURES

    def decide(self, outcome: Outcome, step: int | None, *, may_repeat: bool = True, final: bool = False) -> Decision:
        """Counts the end of an attempt, and decides whether another one follows.

        Args:
          outcome: outcome of the attempt.
          step: last step that any rank has recorded in it; None if none has.
          may_repeat: whether the same outcome of the next attempt would be a repeated failure.
          final: whether a rank has recorded that the job must not be restarted.
        """
        if outcome.code in FINAL:
            return Decision(None)
        if final:
            return Decision(None, "the saved state may be wrong, too, so the job is not restarted")
        if step is not None:
            self.record_training()
        # With code 75 the program itself requests a restart; after a SIGTERM it does not.
        counts = step is None and may_repeat and outcome.code != ExitCode.PREEMPTED
        self._early_failures += counts
        is_limit_reached = counts and self._early_failures >= self._max_early_failures
        if outcome.code in PREEMPTIONS:
            return self._after_preemption(step, is_limit_reached)
        return self._after_failure(step, may_repeat, is_limit_reached)

    def record_resize(self) -> None:
        """Records that the attempt was stopped to change the number of processes, which is not a failure."""
        self._failed_after = None

    def record_training(self) -> None:
        """Records that training has begun, which resets the count of failures before training."""
        self._early_failures = self._early_preemptions = 0
        self._max_early_failures = MAX_LATER_FAILURES

    def _after_preemption(self, step: int | None, is_limit_reached: bool) -> Decision:
        self._failed_after = None
        budget = self._job.preemption_budget
        if self._preemptions == budget:
            return _exhausted(self._preemptions, "max_preemptions")
        if is_limit_reached and budget == math.inf:
            return self._give_up("max_preemptions")
        delay = max(self._job.restart_backoff_seconds, self._backoff(self._early_preemptions))
        self._preemptions += 1
        self._early_preemptions += step is None
        return Decision(delay, f"restart {self._preemptions}{_of(budget)} after preemptions")

    def _after_failure(self, step: int | None, may_repeat: bool, is_limit_reached: bool) -> Decision:
        last_step, self._failed_after = self._failed_after, step if may_repeat else None
        budget = self._job.restart_budget
        if self._failures == budget:
            return _exhausted(self._failures, "max_restarts")
        if may_repeat and step is not None and step == last_step:
            return Decision(None, f"the second failure in a row after step {step}, so the job is not restarted")
        if is_limit_reached and budget == math.inf:
            return self._give_up("max_restarts")
        delay = self._backoff(self._failures)
        self._failures += 1
        after = "" if step is None else f" after step {step}"
        return Decision(delay, f"restart {self._failures}{_of(budget)}{after}")

    def _give_up(self, flag: str) -> Decision:
        event = "began" if self._max_early_failures == MAX_EARLY_FAILURES else "made progress"
        count = f"{self._early_failures} failures in a row before training {event}"
        return Decision(None, f"{count}, so the job is not restarted; --{flag}=N sets another limit")

    def _backoff(self, restarts: int) -> float:
        return min(MAX_BACKOFF_SECONDS, self._job.restart_backoff_seconds * 2 ** min(restarts, 30))


def _of(budget: float) -> str:
    return "" if budget == math.inf else f" of {budget:g}"


def _exhausted(count: int, flag: str) -> Decision:
    return Decision(None, f"--{flag}={count} is used up" if count else "")


_SUSPENDED_SECONDS = 5.0  # between two polls if this process was suspended; launchers poll many times a second
ASSUMED_TRAINING_SECONDS = 3600.0  # after which training is assumed to have begun, even without recorded steps

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
      began: time at which it began.
      reports: reports of launchers whose processes have ended.
      stop_reason: why it was ordered to stop; None if it was not.
      end_required_since: time since which all of its processes have to end; None if they do not have to.
      last_poll: time of the last poll since then.
      awake_seconds: seconds since then, except while this process was suspended.
    """

    number: int
    processes: dict[str, int]
    address: str
    purpose: str
    began: float
    reports: dict[str, Report] = dataclasses.field(default_factory=dict)
    stop_reason: Outcome | None = None
    end_required_since: float | None = None
    last_poll: float = 0.0
    awake_seconds: float = 0.0

    @property
    def size(self) -> int:
        """Total number of processes."""
        return sum(self.processes.values())

    @property
    def pending(self) -> list[str]:
        """Launchers that have not reported."""
        return [name for name in self.processes if name not in self.reports]

    def overdue(self, now: float) -> float:
        """Returns the seconds since all processes have to end; -inf if they do not have to.

        They have to end if the attempt was ordered to stop, or if a launcher failed or its end was requested. A launcher
        whose processes end with code 0 or 75 does not notify the others, whose processes may continue. To be polled: the
        time starts with the first call that detects the condition.
        """
        if self.end_required_since is None and (self.stop_reason or any(map(_ends_all, self.reports.values()))):
            self.end_required_since = self.last_poll = now
        if self.end_required_since is not None:
            self.awake_seconds += min(now - self.last_poll, _SUSPENDED_SECONDS)
        self.last_poll = now
        return -math.inf if self.end_required_since is None else now - self.end_required_since

    @property
    def step(self) -> int | None:
        """Last step that any rank has recorded, or None."""
        return max((report.step for report in self.reports.values() if report.step is not None), default=None)

    def has_begun(self, now: float) -> bool:
        """Returns whether training has begun."""
        return self.step is not None or now - self.began >= ASSUMED_TRAINING_SECONDS

    @property
    def is_final(self) -> bool:
        """Whether a rank has recorded that the job must not be restarted."""
        return any(report.final for report in self.reports.values())

    def cause(self) -> Outcome:
        """Returns the launchers' outcome that most likely caused the others, preferring one that names a rank."""
        outcomes = [report.outcome for report in self.reports.values()]
        if self.pending:
            outcomes.append(loss_of(self.pending))
        return max(outcomes, key=_specificity, default=SUCCESS)


def loss_of(launchers: Sequence[str]) -> Outcome:
    """Returns the outcome of an attempt whose launchers are lost."""
    return Outcome(ExitCode.PEER_LOST, f"{', '.join(launchers)} is lost")


def _ends_all(report: Report) -> bool:
    return report.stopped or report.outcome.code not in (ExitCode.DONE, ExitCode.PREEMPTED)


def _specificity(outcome: Outcome) -> tuple[bool, int, bool]:
    is_specific = outcome.code not in _LEAST_SPECIFIC
    return is_specific, 0 if is_specific else _LEAST_SPECIFIC.index(ExitCode(outcome.code)), outcome.rank is not None


SETTLE_SECONDS = 2.0  # for more launchers to join, before a job on several hosts begins or grows
_MESSAGE_SECONDS = 30.0  # for orders and reports to arrive, and for an attempt's servers to close

_RESIZED = Outcome(ExitCode.PREEMPTED, "the processes stop so that the job can be resized")

# Opens the group of some launchers; returns its address and the purpose from which its token is derived.
OpenGroup = Callable[[Sequence[str]], tuple[str, str]]


@dataclasses.dataclass
class _Member:
    """A launcher that has joined the job: the names of its host, and its slots."""

    host_names: Sequence[str]
    slots: Slots


class JobController:
    """Controls all launchers of a job, which poll it for orders and send it reports.

    The first launcher owns the job: a request to end it ends the job. Any other launcher just leaves.

    A job that is not elastic has one launcher and always runs all its processes. An elastic job runs as many processes
    as there are slots, up to `processes`, and waits while there are fewer than `min_processes`. When a process fails,
    its slot is disabled for a while (see `Slots`), and the remaining ones continue. When slots are added or removed,
    all processes are stopped so that they save, and are started again. Only checkpoints carry state from one attempt to
    the next.

    A launcher that joined later is refused if the processes then end with a bad-input error, because its program differs;
    the others continue. If a larger number of processes ends that way after a smaller one has trained, the larger number
    is not tried again. A launcher that stays connected but does not report long after its processes had to end is lost: it
    hangs, for example on a disk that does not answer. If the first one hangs, the job is over for the others.

    Attributes:
      open_group: serves the group of an attempt's launchers if there are several; set by a job on several hosts.
      close_group: closes that group for launchers that still wait for others.
    """

    def __init__(
        self,
        job: Job,
        say: Callable[[str], object],
        host_slots: Callable[[], Mapping[str, int] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        launched: str = "",
    ):
        """Initializes without launchers.

        Args:
          job: number of processes, and restart budgets.
          say: called with messages about the job.
          host_slots: returns the slots by host, as `Hosts.slots`; None if every launcher may run all processes.
          clock: returns the time in seconds.
          launched: see `Order`.
        """
        self._job, self._say, self._host_slots, self._clock, self._launched = job, say, host_slots, clock, launched
        self.open_group: OpenGroup = lambda names: ("", "")
        self.close_group: Callable[[], object] = lambda: None
        self._min_processes = job.min_processes or job.processes
        self._restarts = Restarts(job)
        # A process that has to end may still be starting or saving before it is killed.
        self._report_timeout = job.start_timeout_seconds + job.grace_seconds + REAP_SECONDS + _MESSAGE_SECONDS
        self._lock = threading.RLock()
        self._members: dict[str, _Member] = {}  # in the order in which they joined
        self._first = ""
        self._trained_launchers: set[str] = set()
        self._trained_size = 0  # the largest number of processes that have trained together
        self._max_processes = job.processes
        self._refused: dict[str, Outcome] = {}
        self._lost_slots: dict[tuple[str, ...], Slots] = {}  # of lost or refused hosts, in case they join again
        self._assigned: tuple[object, dict[str, int]] = (None, {})  # the last result of `_assign_slots`, called often
        self._attempt: AttemptState | None = None
        self._next_number = 0  # of an attempt
        self._not_before = 0.0
        self._short_since: float | None = None
        self._last_plan: tuple[dict[str, int], float] = ({}, 0.0)  # and since when it is unchanged
        self._outcome: Outcome | None = None

    def add_launcher(self, name: str, host_names: Sequence[str]) -> None:
        """Adds a launcher and the names of its host."""
        with self._lock:
            if self._members:
                self._say(f"{name} has joined.")
            self._first = self._first or name
            slots = self._lost_slots.pop(tuple(host_names), None)
            self._members[name] = _Member(host_names, slots or Slots(self._job.rejoin_seconds))

    def remove_launcher(self, name: str, reason: str = "") -> None:
        """Removes a launcher, whose report is no longer expected; logs the reason unless it is empty."""
        with self._lock:
            if self._members.pop(name, None) and reason:
                self._say(f"{name} {reason}.")

    def lose_launcher(self, name: str, reason: str) -> None:
        """Removes a launcher that was lost, and disables its host's slots for a while, as after failed processes.

        A host that repeatedly joins and gets lost must not stop the others each time.
        """
        with self._lock:
            if member := self._members.get(name):
                member.slots.disable(member.slots.total, self._clock())
                self._lost_slots[tuple(member.host_names)] = member.slots
            self.remove_launcher(name, reason)

    def record_report(self, name: str, report: Report) -> None:
        """Records that a launcher's processes have ended."""
        with self._lock:
            if self._attempt and name in self._attempt.processes:
                self._attempt.reports[name] = report

    def end(self, outcome: Outcome, at_once: bool = False) -> None:
        """Requests the end of the job; running processes are stopped first, without waiting for them if `at_once`."""
        with self._lock:
            self._outcome = self._outcome or outcome
            self._report_timeout = 0.0 if at_once else self._report_timeout

    def order(self, name: str) -> Order:
        """Returns the current order for a launcher."""
        with self._lock:
            self._advance()
            attempt = self._attempt
            if attempt and name in attempt.processes and name not in attempt.reports:
                return self._order_in(attempt, name)
            outcome = self._refused.get(name) or (None if attempt else self._outcome)
            return Order(OrderKind.OVER, outcome=outcome) if outcome else Order(OrderKind.WAIT)

    def _order_in(self, attempt: AttemptState, name: str) -> Order:
        if attempt.stop_reason:
            return Order(OrderKind.STOP, attempt.number, outcome=attempt.stop_reason)
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
        if attempt and attempt.overdue(now) >= self._report_timeout:
            self._give_up(attempt)
        if attempt and not any(name in self._members for name in attempt.pending):
            self._conclude(now)
        enabled = self._enabled_slots(now)
        if self._attempt:
            self._stop(self._attempt, enabled, now)
        elif not self._outcome and now >= self._not_before:
            self._begin(self._plan(enabled) or self._plan(self._all_slots()), now)

    def _give_up(self, attempt: AttemptState) -> None:
        """Gives up launchers that have not reported; without the first one, which may be suspended, the job is over."""
        reason = "has not said how its processes ended"
        for name in attempt.pending:
            if name in self._members and name != self._first:
                self._refused[name] = Outcome(ExitCode.PEER_LOST, f"this launcher {reason}")
                self.lose_launcher(name, reason)
        if self._first in attempt.pending and attempt.awake_seconds >= self._report_timeout:
            self._outcome = self._outcome or Outcome(ExitCode.PEER_LOST, f"the coordinator's launcher {reason}")
            self._attempt = None

    def _stop(self, attempt: AttemptState, enabled: Mapping[str, int], now: float) -> None:
        """Orders an attempt to stop, once, if necessary."""
        if attempt.stop_reason:
            return
        lost = [name for name in attempt.pending if name not in self._members]
        if lost:  # its peers wait for it in vain
            attempt.stop_reason = loss_of(lost)
        elif self._outcome:
            attempt.stop_reason = self._outcome
        elif self._needs_resize(attempt.processes, enabled, now):
            attempt.stop_reason = _RESIZED
        if attempt.stop_reason and len(attempt.processes) > 1:
            self.close_group()

    def _enabled_slots(self, now: float) -> dict[str, int]:
        """Returns the number of processes that each launcher may run."""
        host_slots = self._host_slots()
        if host_slots is None:
            totals = dict.fromkeys(self._members, self._job.processes)
        else:
            totals = self._assign_slots(host_slots)
        for name, member in self._members.items():
            member.slots.resize(totals[name])
        return {name: member.slots.enabled(now) for name, member in self._members.items()}

    def _all_slots(self) -> dict[str, int]:
        """Returns the number of slots of each launcher, including disabled ones; empty if these are never enabled again.

        Used if the enabled slots are too few, when waiting would not help.
        """
        if not math.isfinite(self._job.rejoin_seconds):
            return {}
        return {name: member.slots.total for name, member in self._members.items()}

    def _assign_slots(self, host_slots: Mapping[str, int]) -> dict[str, int]:
        """Returns the slots of each launcher.

        A line of the host list that matches several launchers on one host is assigned to the one with the fewest lines.
        """
        key = host_slots, list(self._members)
        if key == self._assigned[0]:
            return self._assigned[1]
        lines: dict[str, list[int]] = {name: [] for name in self._members}
        for host, slots in host_slots.items():
            matching = [name for name, member in self._members.items() if is_named(host, list(member.host_names))]
            if matching:
                lines[min(matching, key=lambda name: len(lines[name]))].append(slots)
        self._assigned = key, {name: sum(slots) for name, slots in lines.items()}
        return self._assigned[1]

    def _plan(self, slots: Mapping[str, int]) -> dict[str, int]:
        """Returns the number of processes for each launcher; empty if they are too few."""
        plan, remaining = {}, self._max_processes
        for name, count in slots.items():
            if count and remaining:
                plan[name] = min(count, remaining)
                remaining -= plan[name]
        return plan if sum(plan.values()) >= self._min_processes else {}

    def _needs_resize(self, running: Mapping[str, int], enabled: Mapping[str, int], now: float) -> bool:
        """Returns whether the attempt must stop because it uses a removed slot, or because more processes could run.

        The latter must have been possible for some time.
        """
        if not self._job.is_elastic:
            return False
        if any(count > self._members[name].slots.total for name, count in running.items() if name in self._members):
            return True
        plan = self._plan(enabled)
        return self._is_settled(plan, now) and sum(plan.values()) > sum(running.values())

    def _is_settled(self, plan: dict[str, int], now: float) -> bool:
        if plan != self._last_plan[0]:
            self._last_plan = plan, now
        has_several_hosts = self._job.is_elastic and self._job.coordinator
        return now - self._last_plan[1] >= (SETTLE_SECONDS if has_several_hosts else 0.0)

    def _begin(self, plan: dict[str, int], now: float) -> None:
        if not plan:
            self._wait_for_slots(now)
            return
        if not self._next_number and not self._is_settled(plan, now):
            return
        self._short_since = None
        address, purpose = self.open_group(list(plan)) if len(plan) > 1 else ("", "")
        if self._job.is_elastic and self._next_number:
            self._say(f"Attempt {self._next_number}: {sum(plan.values())} processes.")
        self._attempt = AttemptState(self._next_number, plan, address, purpose, now)
        self._next_number += 1

    def _wait_for_slots(self, now: float) -> None:
        limit, minimum = self._job.elastic_timeout_seconds, self._min_processes
        if self._short_since is None:
            self._short_since = now
            self._say(
                f"Waiting for processes: {sum(self._enabled_slots(now).values())} can run, at least {minimum} are needed"
                + (f"; giving up in {limit:g} s." if limit else ".")
            )
        elif limit and now - self._short_since > limit:
            reason = f"fewer than {minimum} processes could run for {limit:g} s (--elastic_timeout_seconds)"
            self._outcome = Outcome(ExitCode.PEER_LOST, reason)

    def _conclude(self, now: float) -> None:
        """Ends an attempt whose launchers have all reported or left."""
        attempt, self._attempt = self._attempt, None
        assert attempt
        cause = attempt.cause()
        leaving = [name for name, report in attempt.reports.items() if report.stopped]
        if cause.code == ExitCode.DONE or self._outcome or self._first in leaving:
            has_saved = cause.code in (ExitCode.DONE, ExitCode.PREEMPTED)
            self._outcome = cause if has_saved else self._outcome or cause
            return
        for name in leaving:
            self.remove_launcher(name, "was asked to stop, and has left the job")
        if attempt.has_begun(now):
            self._restarts.record_training()
        if cause.code != ExitCode.BAD_INPUT and attempt.step is not None:
            self._trained_launchers.update(attempt.processes)
            self._trained_size = max(self._trained_size, attempt.size)
        if misfits := self._misfits(attempt, cause):
            self._refuse(misfits, cause, now)
        elif cause.code == ExitCode.BAD_INPUT and 0 < self._trained_size < attempt.size:
            self._limit_size(self._trained_size, attempt, cause)
        elif (attempt.stop_reason == _RESIZED or leaving) and cause.code not in FINAL and not attempt.is_final:
            self._restarts.record_resize()
        else:
            self._retry_or_end(attempt, cause, now)

    def _limit_size(self, size: int, attempt: AttemptState, cause: Outcome) -> None:
        """Limits the job to a size that worked before.

        The flags do not allow the larger size, for example because the batch cannot be split among so many processes.
        """
        self._max_processes = size
        self._restarts.record_resize()
        self._say(f"{cause.reason}.{_log_of(cause)} {attempt.size} processes are too many: at most {size} from now on.")

    def _misfits(self, attempt: AttemptState, cause: Outcome) -> list[str]:
        """Returns the new launchers that cause a bad-input error, if others have trained before."""
        untrained = self._never_trained(attempt) if cause.code == ExitCode.BAD_INPUT else []
        return [name for name in untrained if name != self._first]

    def _never_trained(self, attempt: AttemptState) -> list[str]:
        """Returns the launchers whose processes have never trained, if those of others have."""
        if self._trained_launchers.isdisjoint(attempt.processes):
            return []
        return [name for name in attempt.processes if name not in self._trained_launchers]

    def _idle(self, attempt: AttemptState, cause: Outcome) -> list[str]:
        """Returns the connected launchers that have never trained, if training has not begun and nothing was preempted."""
        if attempt.step is not None or cause.code in PREEMPTIONS:
            return []
        return [name for name in self._never_trained(attempt) if name in self._members]

    def _refuse(self, misfits: Sequence[str], cause: Outcome, now: float) -> None:
        for name in misfits:  # some may have left already
            self._refused[name] = cause
            self.lose_launcher(name, f"does not match the others, and is refused: {cause.reason}")
        self._restarts.record_resize()
        if not self._plan(self._enabled_slots(now)):  # no launcher can train until another one joins
            self._not_before = now + self._job.restart_backoff_seconds

    def _retry_or_end(self, attempt: AttemptState, cause: Outcome, now: float) -> None:
        """Handles a failure, or a preemption that was not requested from a launcher."""
        shrinks = self._disable_failed_slots(attempt, cause, now)
        plan = self._plan(self._enabled_slots(now)) if shrinks else {}
        may_repeat = self._may_repeat(plan, attempt, cause)
        decision = self._restarts.decide(cause, attempt.step, may_repeat=may_repeat, final=attempt.is_final)
        if decision.wait is None:
            reason = "; ".join(filter(None, (cause.reason, decision.reason)))
            self._outcome = dataclasses.replace(cause, reason=reason)
            return
        if excluded := [name for name in self._idle(attempt, cause) if plan and name not in plan]:
            self._say(f"No training has begun with {', '.join(excluded)}: the others continue without it for a while.")
        wait = 0.0 if plan else decision.wait
        when = f"In {wait:g} s" if wait else "At once"
        self._say(f"{cause.reason}.{_log_of(cause)} {when}: {decision.reason}.")
        self._not_before = now + wait

    def _may_repeat(self, plan: Mapping[str, int], attempt: AttemptState, cause: Outcome) -> bool:
        """Returns whether the same outcome of the next attempt would count as a repeated failure.

        Losses of processes do not count while the job continues with fewer processes or without a lost host. With the same
        number of processes they count, because the cause will recur. Before training has begun, no failure counts as long
        as slots are being disabled and the remaining ones are enough: a broken host fails at each start until it is
        excluded. Lost peers do not count then either, because their cause is the network, or an unstable host.
        """
        if attempt.step is None:
            excludes_host = bool(plan) and self._job.rejoin_seconds > 0
            return not excludes_host and cause.code != ExitCode.PEER_LOST
        is_lost = len(attempt.reports) < len(attempt.processes)
        is_smaller = bool(plan) and (is_lost or sum(plan.values()) < attempt.size)
        return not (is_smaller and exceptions.is_loss(cause.code))

    def _disable_failed_slots(self, attempt: AttemptState, cause: Outcome, now: float) -> bool:
        """Disables the slots of failed processes; returns whether any were disabled or a launcher is lost.

        If all processes failed, no slot is disabled, because no single host is the cause. Launchers with which no training
        has begun lose all their slots: a host that hangs at startup, or that the others cannot reach, must not stop them
        each time.
        """
        if not self._job.is_elastic:
            return False
        failed = orders.failures_by_launcher(attempt.processes, attempt.reports)
        if sum(failed.values()) == attempt.size:
            failed = {}
        failed |= {name: self._members[name].slots.total for name in self._idle(attempt, cause)}
        for name, count in failed.items():
            if name in self._members:
                self._members[name].slots.disable(count, now)
        return any(failed.values()) or len(attempt.reports) < len(attempt.processes)


def _log_of(cause: Outcome) -> str:
    return f" Its log: {cause.log}." if cause.log else ""
