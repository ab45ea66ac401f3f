"""Detects hanging runs: reports where each rank is if a call does not return, and exits with code 4."""

import dataclasses
import itertools
import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

from tfdist.cluster import signals
from tfdist.cluster.signals import main_stack, print_line
from tfdist.coordination import Group, Json
from tfdist.errors import ExitCode

TOPIC = "stalls"
_LEAVE_SECONDS = 0.5
_RESOLUTION_SECONDS = 1.0  # of the time measurement
ANSWER_SECONDS = 2.0  # a rank that does not answer within this time is suspended or does not release the GIL


@dataclasses.dataclass(eq=False)
class _Call:
    description: str  # for reports
    start_time: float  # in seconds of `time.monotonic()`
    usual_seconds: float  # estimated from previous calls
    is_first: bool  # the first call, which compiles everything
    elapsed: float = 0.0  # seconds, as measured by the watching thread


class _Query(NamedTuple):
    """A query of all ranks; `time` is in seconds of `time.monotonic()`."""

    sequence_number: int
    time: float
    reason: str
    is_first: bool


class Watchdog:
    """Monitors the calls of a run's compiled loop, on every rank.

    Use it as a context manager around the run. The main thread reports when it enters a call (`begin`) and when it
    leaves it (`end_call`). A second thread detects calls that take too long, and queries all ranks over the group, which
    works while collectives hang. Each rank answers from a thread, and the lowest rank that answers prints all answers.
    Nothing is sent while calls return in time. SIGUSR1 to any rank triggers the same report at any time, if the run is in
    the main thread.

    The limits are added to twice the time that the slowest call so far would have taken for the same number of steps;
    slow steps are not reported as hangs. The first call, which compiles everything, has no limit, and is never
    ended. During this call the ranks are queried periodically, and a report is printed when the set of ranks that are not
    in a call or do not answer changes, and once when the limit for other calls has passed. The time between two calls
    (callbacks, an evaluation) is not limited: a rank that hangs there is reported by the ranks that wait for it in the
    next call. If all ranks hang there, nothing ends them, but SIGUSR1 shows where they are.
    """

    def __init__(
        self,
        group: Group,
        *,
        warning_seconds: float,
        shutdown_seconds: float,
        print_report: Callable[[str], object] = lambda text: print_line(text, sys.stderr),
        end: Callable[[int], object] = os._exit,
    ):
        """Initializes the watchdog.

        Args:
          group: the ranks of the run.
          warning_seconds: duration after which a call is reported once; 0 for never. Also the interval of queries during
            the first call.
          shutdown_seconds: duration after which a call, except the first, is reported and ends the job; 0 for never.
          print_report: prints a report on the lowest rank that answers, and the reason for ending on every rank.
          end: ends the process with an exit code.
        """
        self._group, self._print_report, self._end = group, print_report, end
        self._rank = group.ranks[group.rank]  # in the job
        self._warning_seconds, self._shutdown_seconds = warning_seconds, shutdown_seconds
        self._condition = threading.Condition()  # guards the attributes below
        self._call: _Call | None = None  # the running call
        self._pace = 0.0  # seconds per step of the slowest call that has ended
        self._ended_calls = 0  # number of calls that have ended
        self._step = 0
        self._calls = 0  # number of calls that have begun
        self._closed = False
        self._last_query = ""
        # By index of the query; all ranks receive queries in the same order.
        self._answers: list[dict[int, Json]] = []
        self._queries: deque[_Query] = deque()  # not reported yet
        self._last_summary = ""  # summary of the latest answers during the first call
        self._ended_members: set[int] = set()  # members whose run has ended
        self._stack = ExitStack()

    def begin(self, step: int, end_step: int) -> None:
        """Records that the main thread enters a call of the compiled loop.

        If `end_step` equals `step`, the main thread waits for the callbacks of the other ranks after this step.
        """
        with self._condition:
            description = (
                f"the call from step {step} to {end_step}"
                if end_step > step
                else f"the wait for the callbacks of step {step}"
            )
            usual_seconds = 2 * self._pace * (end_step - step)
            self._step, self._call = step, _Call(description, time.monotonic(), usual_seconds, is_first=not self._calls)
            self._calls += 1
            self._condition.notify_all()

    def end_call(self, step: int) -> None:
        """Records that the call has ended at a step."""
        with self._condition:
            if self._call and step > self._step:
                pace = (time.monotonic() - self._call.start_time) / (step - self._step)
                self._ended_calls += 1
                self._pace = pace if self._ended_calls < 3 else max(pace, self._pace)  # excludes compilation
            self._call, self._step = None, step
            self._condition.notify_all()

    def report(self, reason: str) -> None:
        """Requests a report about all ranks. Does not wait; may be called from any thread."""
        self._query_ranks(secrets.token_hex(8), reason)

    def __enter__(self) -> "Watchdog":
        self._group.subscribe(TOPIC, self._on_message)
        threading.Thread(target=self._watch, name=f"stalls-{self._rank}", daemon=True).start()
        if signals.can_set_handlers() and signals.has_default_handler(signal.SIGUSR1):
            reason = f"SIGUSR1 to rank {self._rank}"
            self._stack.enter_context(signals.handle_signals({signal.SIGUSR1: lambda _: self.report(reason)}))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        with self._condition:
            self._closed, self._call = True, None
            self._condition.notify_all()
        self._group.publish(TOPIC, {"over": self._group.rank})

    def _watch(self) -> None:
        """Waits for a call, then for its limits in increasing order."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closed or self._call is not None)
                if self._closed:
                    return
                call = self._call
            assert call is not None
            last_limit = 0.0
            for limit in self._limits(call):
                if not self._exceeds(call, limit):
                    break
                # The name depends only on the call: ranks that wait in the same call cause a single query.
                reason = f"{call.description} has lasted {limit + call.usual_seconds:.3g} s on rank {self._rank}"
                self._query_ranks(
                    f"{call.description} {limit}",
                    reason,
                    is_first=call.is_first and not last_limit < self._shutdown_seconds <= limit,
                )
                last_limit = limit
            if (
                self._shutdown_seconds
                and not call.is_first
                and self._exceeds(call, self._shutdown_seconds + 2 * ANSWER_SECONDS)
            ):
                seconds = self._shutdown_seconds + call.usual_seconds
                reason = f"{call.description} has lasted {seconds:.3g} s, as long as --stall_shutdown_seconds allows"
                self._group.publish(TOPIC, {"end": reason})
            self._exceeds(call, float("inf"))

    def _limits(self, call: _Call) -> Iterable[float]:
        """Returns the times, in seconds beyond the usual duration, at which the ranks are queried."""
        if call.is_first and self._warning_seconds:
            return itertools.count(self._warning_seconds, self._warning_seconds)
        return sorted({self._warning_seconds, self._shutdown_seconds} - {0.0})

    def _exceeds(self, call: "_Call", limit: float) -> bool:
        """Waits until a call has lasted `limit` seconds beyond its usual duration; returns whether it is still running.

        Time during which this process was suspended, for example by Ctrl-Z, does not count.
        """
        with self._condition:
            while call.elapsed < limit + call.usual_seconds:
                seconds = min(_RESOLUTION_SECONDS, limit + call.usual_seconds - call.elapsed)
                if self._condition.wait_for(lambda: self._closed or self._call is not call, seconds):
                    return False
                call.elapsed += seconds
            return self._call is call and not self._closed

    def _query_ranks(self, name: str, reason: str, is_first: bool = False) -> None:
        self._group.publish(TOPIC, {"ask": name, "why": reason, "first": is_first})

    def _on_message(self, message: Any) -> bool:
        """Handles a message of the topic, on every rank in the same order."""
        if "ask" in message:
            if message["ask"] != self._last_query:
                self._last_query = message["ask"]
                self._answer(message)
        elif "answer" in message:
            self._answers[message["answer"]][message["rank"]] = message["where"]
        elif "end" in message:
            rank = f"rank {self._rank} of {self._group.size}"
            self._print_report(f"{rank}: {message['end']}. Ending with code {ExitCode.STALLED:d}.")
            # In another thread, because `leave` would wait for this thread, and for longer than other ranks wait for this
            # process to end.
            leave_thread = threading.Thread(
                target=self._group.leave, args=(ExitCode.STALLED, message["end"]), daemon=True
            )
            leave_thread.start()
            leave_thread.join(_LEAVE_SECONDS)
            self._end(ExitCode.STALLED)
        else:
            self._ended_members.add(message["over"])
        return self._ended_members | self._group.departed_members >= {*range(self._group.size)}

    def _answer(self, message: Any) -> None:
        query = _Query(len(self._answers), time.monotonic(), message["why"], message["first"])
        self._answers.append({})
        with self._condition:
            self._queries.append(query)
            is_reporting = len(self._queries) > 1
        if not is_reporting:
            threading.Thread(target=self._report_in_order, name=f"stalls-{self._rank}", daemon=True).start()
        call = self._call
        call_state = call and [call.description, time.monotonic() - call.start_time]
        wait = self._group.describe_wait()
        state = {"step": self._step, "call": call_state, "wait": wait, "stack": main_stack()}
        self._group.publish(TOPIC, {"answer": query.sequence_number, "rank": self._rank, "where": state})

    def _report_in_order(self) -> None:
        """Reports the answers to all queries, each after the ranks have had time to answer.

        Runs in a single thread, because a report depends on the previous one.
        """
        is_last = False
        while not is_last:
            query = self._queries[0]
            time.sleep(max(0.0, query.time + ANSWER_SECONDS - time.monotonic()))
            self._print_answers(query)
            with self._condition:
                self._queries.popleft()
                is_last = not self._queries

    def _print_answers(self, query: _Query) -> None:
        """Prints, on one rank, which ranks are in the call, which are not, and which did not answer."""
        answers, self._answers[query.sequence_number] = self._answers[query.sequence_number], {}  # releases the stacks
        ranks_in_call = [rank for rank, state in sorted(answers.items()) if state["call"]]
        ranks_elsewhere = [rank for rank, state in sorted(answers.items()) if not state["call"]]
        lost_ranks = [self._group.ranks[member] for member in self._group.departed_members]
        silent_ranks = [rank for rank in self._group.ranks if rank not in answers and rank not in lost_ranks]
        kinds = {"in a call": ranks_in_call, "not in a call": ranks_elsewhere, "no answer": silent_ranks}
        rank_texts = {kind: [f"{rank}{self._group.role(rank)}" for rank in ranks] for kind, ranks in kinds.items()}
        summary = "; ".join(f"{kind}: {', '.join(ranks)}" for kind, ranks in rank_texts.items() if ranks)
        printing_ranks = list(answers)
        if query.is_first:
            # Only ranks in the call may print: a rank that joins the run late receives outdated answers.
            is_new = len(ranks_in_call) < self._group.size - len(lost_ranks) and summary != self._last_summary
            printing_ranks, self._last_summary = ranks_in_call if is_new else [], summary
        if min(printing_ranks, default=None) != self._rank:
            return
        lines = [f"State of the ranks ({query.reason}). {summary}."]
        for rank, state in sorted(answers.items()):
            call = state["call"]
            activity = f"for {call[1]:.1f} s in {call[0]}" if call else "between two calls"
            activity += f", waiting for {state['wait']}" if state["wait"] else ""
            lines += [f"rank {rank}{self._group.role(rank)}: step {state['step']}, {activity}"]
            lines += [f"  {frame}" for frame in state["stack"]]
        self._print_report("\n".join(lines))
