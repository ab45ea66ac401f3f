"""Controls a job on all hosts: the number of processes of each launcher, restarts, and its end."""

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfdist.errors import SIGNAL_OFFSET, ExitCode, is_external_failure
from tfdist.launcher import orders
from tfdist.launcher.hosts import matches_host
from tfdist.launcher.job import SUCCESS, Job, Outcome
from tfdist.launcher.orders import Order, OrderKind, Report

MAX_REJOIN_SECONDS = 3600.0


class Slots:
    """The slots of a host in an elastic job.

    The first failure disables a slot for `rejoin_seconds` (0 to keep it enabled, inf for forever). The delay doubles with
    each failure, up to an hour, because a broken host should be retried less and less often. It is reset after an hour with
    all slots enabled. If the host list changes the number of slots, all slots are enabled, because the host has probably been
    repaired.
    """

    def __init__(self, rejoin_seconds: float):
        self._first_delay = self._delay = rejoin_seconds
        self.total = 0  # including disabled slots
        self._disabled_until: list[float] = []  # times, one per disabled slot
        self._all_enabled_since = -math.inf

    def resize(self, total: int) -> None:
        """Sets the number of slots of the host."""
        if total != self.total:
            self._disabled_until = []
        self.total = total

    def disable(self, count: int, now: float) -> None:
        """Disables the slots of `count` failed processes."""
        if not count:
            return
        if now - self._all_enabled_since > MAX_REJOIN_SECONDS:
            self._delay = self._first_delay
        self._disabled_until += [now + self._delay] * count
        self._all_enabled_since = max(self._all_enabled_since, now + self._delay)
        self._delay = max(self._delay, min(2 * self._delay, MAX_REJOIN_SECONDS))

    def count_enabled(self, now: float) -> int:
        """Returns the number of enabled slots."""
        self._disabled_until = [end for end in self._disabled_until if end > now]
        return max(0, self.total - len(self._disabled_until))


MAX_BACKOFF_SECONDS = 60.0
MAX_EARLY_FAILURES = 5  # in a row before training begins, for example because of a slow network or host
MAX_LATER_FAILURES = 15  # in a row after training has begun; with the delays, tolerates an outage of ten minutes
# Not restarted: a finished job, bad input, and a loss that is not finite, which a resumed run would repeat.
FINAL_CODES = frozenset({ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NOT_FINITE})

# Includes SIGTERM, which schedulers may send to a process that cannot save yet or has already saved.
PREEMPTION_CODES = frozenset({ExitCode.PREEMPTED, SIGNAL_OFFSET + signal.SIGTERM})


class Decision(NamedTuple):
    """The decision after an attempt.

    Attributes:
      wait: seconds until the next attempt; None to end the job.
      reason: explanation, as the end of a sentence; may be empty.
    """

    wait: float | None
    reason: str = ""


class Restarts:
    """Counts the restarts of a job after failures and preemptions, each with its own budget.

    A repeated failure is not retried: two successive attempts that fail after the same step, the last one that a rank has
    recorded in its `tfdist.cluster.progress_file`. Without a recorded step (training has not begun, or the program records no
    progress), the job's budget limits the restarts; if it is unlimited, `MAX_EARLY_FAILURES` successive failures count as a
    repeated failure, or `MAX_LATER_FAILURES` if training has begun before.
    """

    def __init__(self, job: Job):
        self._job = job
        self._failures = self._preemptions = 0
        self._failed_step: int | None = None
        self._early_failures = self._early_preemptions = 0  # in a row, before training begins
        self._max_early_failures = MAX_EARLY_FAILURES

    def decide(self, outcome: Outcome, step: int | None, *, may_repeat: bool = True, final: bool = False) -> Decision:
        """Counts the end of an attempt, and decides about another attempt.

        Args:
          outcome: outcome of the attempt.
          step: last step that a rank has recorded in the attempt, or None.
          may_repeat: whether the same outcome of the next attempt would be a repeated failure.
          final: whether a rank has recorded that the job must not be restarted.
        """
        if outcome.code in FINAL_CODES:
            return Decision(None)
        if final:
            return Decision(None, "the saved state may be wrong, too, so the job is not restarted")
        if step is not None:
            self.record_training()
        # Code 75 is a program's request to be restarted, but SIGTERM is not.
        is_early_failure = step is None and may_repeat and outcome.code != ExitCode.PREEMPTED
        self._early_failures += is_early_failure
        is_preemption = outcome.code in PREEMPTION_CODES
        last_step, self._failed_step = self._failed_step, step if may_repeat and not is_preemption else None
        flag, count, budget = "max_restarts", self._failures, self._job.restart_budget
        if is_preemption:
            flag, count, budget = "max_preemptions", self._preemptions, self._job.preemption_budget
        if count == budget:
            return Decision(None, f"--{flag}={count} is used up" if count else "")
        if self._failed_step is not None and step == last_step:
            return Decision(None, f"the second failure in a row after step {step}, so the job is not restarted")
        if budget == math.inf and is_early_failure and self._early_failures >= self._max_early_failures:
            event = "began" if self._max_early_failures == MAX_EARLY_FAILURES else "made progress"
            failures = f"{self._early_failures} failures in a row before training {event}"
            return Decision(None, f"{failures}, so the job is not restarted; --{flag}=N sets another limit")
        if is_preemption:
            delay = max(self._job.restart_backoff_seconds, self._backoff(self._early_preemptions))
            self._preemptions += 1
            self._early_preemptions += step is None
        else:
            delay = self._backoff(self._failures)
            self._failures += 1
        limit = "" if budget == math.inf else f" of {budget:g}"
        cause = " after preemptions" if is_preemption else "" if step is None else f" after step {step}"
        return Decision(delay, f"restart {count + 1}{limit}{cause}")

    def record_resize(self) -> None:
        """Records that an attempt was stopped to resize the job, which is not a failure."""
        self._failed_step = None

    def record_training(self) -> None:
        """Records that training has begun, and resets the number of early failures."""
        self._early_failures = self._early_preemptions = 0
        self._max_early_failures = MAX_LATER_FAILURES

    def _backoff(self, restarts: int) -> float:
        return min(MAX_BACKOFF_SECONDS, self._job.restart_backoff_seconds * 2 ** min(restarts, 30))


ASSUMED_TRAINING_SECONDS = 3600.0  # after which training has probably begun, even without recorded steps

# Exit codes that are rarely the cause, the least likely first.
_UNSPECIFIC_CODES = (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.PEER_LOST)


@dataclasses.dataclass
class AttemptState:
    """State of a running attempt."""

    orders: dict[str, Order]  # of each launcher, in the order of ranks
    start_time: float
    reports: dict[str, Report] = dataclasses.field(default_factory=dict)  # of launchers whose processes have ended
    stop_reason: Outcome | None = None  # why the launchers were ordered to stop the attempt

    @property
    def processes(self) -> dict[str, int]:
        """Number of processes of each launcher."""
        return {name: order.processes for name, order in self.orders.items()}

    @property
    def size(self) -> int:
        """Total number of processes."""
        return sum(self.processes.values())

    @property
    def pending_launchers(self) -> list[str]:
        """Launchers that have not reported."""
        return [name for name in self.processes if name not in self.reports]

    @property
    def step(self) -> int | None:
        """The last step that a rank has recorded, or None."""
        return max((report.step for report in self.reports.values() if report.step is not None), default=None)

    def has_begun(self, now: float) -> bool:
        """Returns whether training has begun."""
        return self.step is not None or now - self.start_time >= ASSUMED_TRAINING_SECONDS

    @property
    def is_final(self) -> bool:
        """Whether a rank has recorded that the job must not be restarted."""
        return any(report.final for report in self.reports.values())

    def cause(self) -> Outcome:
        """Returns the outcome that most likely caused the others, preferably one that names a rank."""
        outcomes = [report.outcome for report in self.reports.values()]
        if self.pending_launchers:
            outcomes.append(lost_outcome(self.pending_launchers))
        return max(outcomes, key=_specificity, default=SUCCESS)


def lost_outcome(launchers: Sequence[str]) -> Outcome:
    """Returns the outcome of an attempt whose launchers are lost."""
    return Outcome(ExitCode.PEER_LOST, f"{', '.join(launchers)} is lost")


def _specificity(outcome: Outcome) -> tuple[bool, int, bool]:
    is_specific = outcome.code not in _UNSPECIFIC_CODES
    return is_specific, 0 if is_specific else _UNSPECIFIC_CODES.index(ExitCode(outcome.code)), outcome.rank is not None


SETTLE_SECONDS = 2.0  # time for more launchers to join before a job on several hosts begins or grows

_RESIZE_OUTCOME = Outcome(ExitCode.PREEMPTED, "the processes stop so that the job can be resized")

# Opens the group of an attempt, given its number and the number of launchers; returns its address.
OpenGroup = Callable[[int, int], str]


@dataclasses.dataclass
class _Member:
    host_names: Sequence[str]
    slots: Slots


class JobController:
    """Controls all launchers of a job, which poll it for orders and send it reports.

    The first launcher owns the job: if its end is requested, the job ends. Other launchers then only leave the job.

    A job that is not elastic has one launcher and always runs all its processes. An elastic job runs as many processes as
    there are slots, up to `processes`, and waits if there are fewer than `min_processes`. If a process fails, its slot is
    disabled for a while (see `Slots`), and the job continues with the remaining slots. If slots are added or removed, all
    processes save, stop, and are started again. Only checkpoints carry state from one attempt to the next.

    If a larger number of processes ends with a bad-input error after a smaller number has trained, the larger number is not
    tried again, because the flags or the program of a new launcher do not support it.

    Attributes:
      open_group: serves the group of several launchers of an attempt; set by jobs on several hosts.
      close_group: closes that group, for launchers that still wait for others.
    """

    def __init__(
        self,
        job: Job,
        say: Callable[[str], object],
        host_slots: Callable[[], Mapping[str, int] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        job_name: str = "",
    ):
        """Creates a controller without launchers.

        Args:
          job: the job to control.
          say: called with messages.
          host_slots: returns the slots of each host, or None if launchers may run all processes.
          clock: returns the time in seconds.
          job_name: name of the job.
        """
        self._job, self._print_line, self._host_slots = job, say, host_slots
        self._clock, self._job_name = clock, job_name
        self.open_group: OpenGroup = lambda attempt, size: ""
        self.close_group: Callable[[], object] = lambda: None
        self._min_processes = job.min_processes or job.processes
        self._restarts = Restarts(job)
        self._lock = threading.RLock()
        self._members: dict[str, _Member] = {}  # in the order of joining
        self._first_launcher = ""
        self._trained_launchers: set[str] = set()
        self._trained_size = 0  # the largest number of processes that have trained together
        self._max_processes = job.processes
        self._lost_slots: dict[tuple[str, ...], Slots] = {}  # of lost hosts, which may join again
        self._assignment: tuple[object, dict[str, int]] = (None, {})  # cached result of `_assign_slots`
        self._attempt: AttemptState | None = None
        self._next_attempt = 0  # index of the next attempt
        self._not_before = 0.0
        self._waiting_since: float | None = None
        self._last_plan: tuple[dict[str, int], float] = ({}, 0.0)  # with the time of its last change
        self._outcome: Outcome | None = None

    def add_launcher(self, name: str, host_names: Sequence[str]) -> None:
        """Adds a launcher, with the names of its host."""
        with self._lock:
            if self._members:
                self._print_line(f"{name} has joined.")
            self._first_launcher = self._first_launcher or name
            slots = self._lost_slots.pop(tuple(host_names), None)
            self._members[name] = _Member(host_names, slots or Slots(self._job.rejoin_seconds))

    def remove_launcher(self, name: str, reason: str = "") -> None:
        """Removes a launcher, without waiting for its report, and logs a non-empty reason."""
        with self._lock:
            if self._members.pop(name, None) and reason:
                self._print_line(f"{name} {reason}.")

    def lose_launcher(self, name: str, reason: str) -> None:
        """Removes a lost launcher, and disables the slots of its host for a while, as after failures of processes.

        Otherwise, a host that repeatedly joins and is lost would stop the other hosts each time.
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

    def end(self, outcome: Outcome, is_immediate: bool = False) -> None:
        """Requests the end of the job, after its processes have stopped or, with `is_immediate`, without waiting for them."""
        with self._lock:
            self._outcome = self._outcome or outcome
            self._attempt = None if is_immediate else self._attempt

    def order(self, name: str) -> Order:
        """Returns the current order for a launcher."""
        with self._lock:
            self._advance()
            attempt = self._attempt
            if attempt and name in attempt.orders and name not in attempt.reports:
                order, stop_reason = attempt.orders[name], attempt.stop_reason
                return Order(OrderKind.STOP, order.attempt, outcome=stop_reason) if stop_reason else order
            outcome = None if attempt else self._outcome
            return Order(OrderKind.OVER, outcome=outcome) if outcome else Order(OrderKind.WAIT)

    def _advance(self) -> None:
        now, attempt = self._clock(), self._attempt
        if attempt and not any(name in self._members for name in attempt.pending_launchers):
            self._end_attempt(now)
        enabled_slots = self._enabled_slots(now)
        if self._attempt:
            self._stop_if_needed(self._attempt, enabled_slots, now)
        elif not self._outcome and now >= self._not_before:
            self._begin(self._plan(enabled_slots) or self._plan(self._all_slots()), now)

    def _stop_if_needed(self, attempt: AttemptState, enabled_slots: Mapping[str, int], now: float) -> None:
        if attempt.stop_reason:
            return
        lost_launchers = [name for name in attempt.pending_launchers if name not in self._members]
        if lost_launchers:  # the other launchers would wait forever
            attempt.stop_reason = lost_outcome(lost_launchers)
        elif self._outcome:
            attempt.stop_reason = self._outcome
        elif self._needs_resize(attempt.processes, enabled_slots, now):
            attempt.stop_reason = _RESIZE_OUTCOME
        if attempt.stop_reason and len(attempt.processes) > 1:
            self.close_group()

    def _enabled_slots(self, now: float) -> dict[str, int]:
        host_slots = self._host_slots()
        if host_slots is None:
            totals = dict.fromkeys(self._members, self._job.processes)
        else:
            totals = self._assign_slots(host_slots)
        for name, member in self._members.items():
            member.slots.resize(totals[name])
        return {name: member.slots.count_enabled(now) for name, member in self._members.items()}

    def _all_slots(self) -> dict[str, int]:
        """Returns the number of slots of each launcher, including disabled ones; empty if these stay disabled forever.

        Used if there are too few enabled slots, when waiting would not help.
        """
        if not math.isfinite(self._job.rejoin_seconds):
            return {}
        return {name: member.slots.total for name, member in self._members.items()}

    def _assign_slots(self, host_slots: Mapping[str, int]) -> dict[str, int]:
        """Returns the slots of each launcher.

        If a line of the host list matches several launchers, it is assigned to the one with the fewest lines.
        """
        key = host_slots, list(self._members)
        if key == self._assignment[0]:
            return self._assignment[1]
        lines: dict[str, list[int]] = {name: [] for name in self._members}
        for host, slots in host_slots.items():
            names = [name for name, member in self._members.items() if matches_host(host, list(member.host_names))]
            if names:
                lines[min(names, key=lambda name: len(lines[name]))].append(slots)
        self._assignment = key, {name: sum(slots) for name, slots in lines.items()}
        return self._assignment[1]

    def _plan(self, slots: Mapping[str, int]) -> dict[str, int]:
        plan, free_count = {}, self._max_processes
        for name, count in slots.items():
            if count and free_count:
                plan[name] = min(count, free_count)
                free_count -= plan[name]
        return plan if sum(plan.values()) >= self._min_processes else {}  # too few slots

    def _needs_resize(self, running: Mapping[str, int], enabled_slots: Mapping[str, int], now: float) -> bool:
        """Returns whether the attempt must stop because it uses a removed slot, or because more processes can now run."""
        if not self._job.is_elastic:
            return False
        if any(count > self._members[name].slots.total for name, count in running.items() if name in self._members):
            return True
        plan = self._plan(enabled_slots)
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
        if not self._next_attempt and not self._is_settled(plan, now):
            return
        self._waiting_since = None
        address = self.open_group(self._next_attempt, len(plan)) if len(plan) > 1 else ""
        if self._job.is_elastic and self._next_attempt:
            self._print_line(f"Attempt {self._next_attempt}: {sum(plan.values())} processes.")
        number, nodes, job_name = self._next_attempt, len(plan), self._job_name
        attempt_orders = {
            name: Order(OrderKind.RUN, number, node, nodes, count, address, job_name=job_name)
            for node, (name, count) in enumerate(plan.items())
        }
        self._attempt = AttemptState(attempt_orders, now)
        self._next_attempt += 1

    def _wait_for_slots(self, now: float) -> None:
        limit, minimum = self._job.elastic_timeout_seconds, self._min_processes
        if self._waiting_since is None:
            self._waiting_since = now
            self._print_line(
                f"Waiting for processes: {sum(self._enabled_slots(now).values())} can run, at least {minimum} are needed"
                + (f"; giving up in {limit:g} s." if limit else ".")
            )
        elif limit and now - self._waiting_since > limit:
            reason = f"fewer than {minimum} processes could run for {limit:g} s (--elastic_timeout_seconds)"
            self._outcome = Outcome(ExitCode.PEER_LOST, reason)

    def _end_attempt(self, now: float) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt
        cause = attempt.cause()
        leaving_launchers = [name for name, report in attempt.reports.items() if report.stopped]
        if cause.code == ExitCode.DONE or self._outcome or self._first_launcher in leaving_launchers:
            has_saved = cause.code in (ExitCode.DONE, ExitCode.PREEMPTED)
            self._outcome = cause if has_saved else self._outcome or cause
            return
        for name in leaving_launchers:
            self.remove_launcher(name, "was asked to stop, and has left the job")
        if attempt.has_begun(now):
            self._restarts.record_training()
        if cause.code != ExitCode.BAD_INPUT and attempt.step is not None:
            self._trained_launchers.update(attempt.processes)
            self._trained_size = max(self._trained_size, attempt.size)
        if cause.code == ExitCode.BAD_INPUT and 0 < self._trained_size < attempt.size:
            self._max_processes = self._trained_size
            self._restarts.record_resize()
            self._print_line(
                f"{cause.reason}.{_log_text(cause)} {attempt.size} processes are too many: at most {self._trained_size} "
                "from now on."
            )
        elif (
            (attempt.stop_reason == _RESIZE_OUTCOME or leaving_launchers)
            and cause.code not in FINAL_CODES
            and not attempt.is_final
        ):
            self._restarts.record_resize()
        else:
            self._retry_or_end(attempt, cause, now)

    def _idle_launchers(self, attempt: AttemptState, cause: Outcome) -> list[str]:
        """Returns the connected launchers that have never trained, if training has not begun and was not preempted."""
        if attempt.step is not None or cause.code in PREEMPTION_CODES:
            return []
        if self._trained_launchers.isdisjoint(attempt.processes):
            return []
        return [name for name in attempt.processes if name in self._members and name not in self._trained_launchers]

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
        if excluded_launchers := [name for name in self._idle_launchers(attempt, cause) if plan and name not in plan]:
            self._print_line(
                f"No training has begun with {', '.join(excluded_launchers)}: the others continue without it for a while."
            )
        wait = 0.0 if plan else decision.wait
        time_text = f"In {wait:g} s" if wait else "At once"
        self._print_line(f"{cause.reason}.{_log_text(cause)} {time_text}: {decision.reason}.")
        self._not_before = now + wait

    def _may_repeat(self, plan: Mapping[str, int], attempt: AttemptState, cause: Outcome) -> bool:
        """Returns whether the same outcome of the next attempt would count as a repeated failure.

        Lost processes do not count if the job continues with fewer processes or without a lost host. With the same number of
        processes, they count, because the cause will recur. Before training has begun, no failure counts if slots are
        disabled and the remaining ones suffice: a broken host fails in each attempt until it is excluded. Lost peers do
        not count then, either, because their cause is the network or an unstable host.
        """
        if attempt.step is None:
            excludes_host = bool(plan) and self._job.rejoin_seconds > 0
            return not excludes_host and cause.code != ExitCode.PEER_LOST
        is_lost = len(attempt.reports) < len(attempt.processes)
        is_smaller = bool(plan) and (is_lost or sum(plan.values()) < attempt.size)
        return not (is_smaller and is_external_failure(cause.code))

    def _disable_failed_slots(self, attempt: AttemptState, cause: Outcome, now: float) -> bool:
        """Disables the slots of failed processes; returns whether any were disabled or a launcher is lost.

        If all processes have failed, no slot is disabled, because no single host is the cause. All slots of launchers that
        have never trained are disabled: a host that hangs at startup or is unreachable must not stop the others each time.
        """
        if not self._job.is_elastic:
            return False
        failures = orders.failures_by_launcher(attempt.processes, attempt.reports)
        if sum(failures.values()) == attempt.size:
            failures = {}
        failures |= {name: self._members[name].slots.total for name in self._idle_launchers(attempt, cause)}
        for name, count in failures.items():
            if name in self._members:
                self._members[name].slots.disable(count, now)
        return any(failures.values()) or len(attempt.reports) < len(attempt.processes)


def _log_text(cause: Outcome) -> str:
    return f" Its log: {cause.log}." if cause.log else ""
