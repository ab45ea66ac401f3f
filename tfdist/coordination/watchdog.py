"""Hangs of a run: which ranks are in the call that does not end, where each one is, and an end with code 4."""

import dataclasses
import itertools
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from tfdist.coordination import Group, Json
from tfdist.errors import ExitCode
from tfdist.process import signals
from tfdist.process.stack_dumps import main_stack

TOPIC = "stalls"
_FAREWELL_SECONDS = 0.5
_PIECE_SECONDS = 1.0  # in which time is counted
ANSWER_SECONDS = 2.0  # who has not answered by then is stopped, or holds Python's lock


@dataclasses.dataclass(eq=False)
class _Call:
    """A call that runs, in words.

    Attributes:
      what: it is.
      begun: when.
      usual: seconds that it may take by what calls before it took.
      first: whether it is the one in which everything is compiled.
      lasted: seconds so far, as its watch has counted them.
    """

    what: str
    begun: float
    usual: float
    first: bool
    lasted: float = 0.0


class Watchdog:
    """Watches the calls of one run's compiled loop, on every rank; a context manager around the run.

    The main thread says when it enters a call (`begin`) and when it has left it (`reached`). A thread beside it notices a
    call that lasts too long, and asks all ranks over the group, which works while collectives hang: each answers from
    a thread, and the first of those that answer says what they all did. Nothing is sent as long as calls end in time.
    SIGUSR1 to any rank asks the same, at any time of the run, if the run is in the main thread.

    The limits are beyond twice what the slowest call so far would have taken for as many steps, so that slow steps are no
    stall. The first call, in which everything is compiled, may last as long as it wants, and is never ended: the ranks are
    asked again and again, and what they answer is said only if some rank is not in a call or silent, and said once until
    that changes; and once past the limit that ends other calls, wherever all are. What stands between two calls may last,
    too: a callback, an evaluation. A rank that hangs there is noticed by those that wait for it in the next call. If all
    hang there, in an evaluation, SIGUSR1 shows it, and nothing ends them.
    """

    def __init__(
        self,
        group: Group,
        *,
        warning_seconds: float,
        shutdown_seconds: float,
        say: Callable[[str], object] = lambda text: print(text, file=sys.stderr, flush=True),
        end: Callable[[int], object] = os._exit,
    ):
        """Watches nothing yet.

        Args:
          group: of all ranks that run.
          warning_seconds: a call that lasts longer is reported, once; 0 for never. Also how often ranks are asked in the
            first call.
          shutdown_seconds: a call that lasts longer, but for the first, is reported and ends the job; 0 for never.
          say: gets the report, on the first rank that can say it, and on every rank why it ends.
          end: ends the process with a code.
        """
        self._group, self._say, self._end = group, say, end
        self._warning, self._shutdown = warning_seconds, shutdown_seconds
        self._news = threading.Condition()  # around what follows
        self._call: _Call | None = None  # that runs
        self._pace = 0.0  # the seconds of a step, in the slowest call that has ended
        self._paced = 0  # how many calls have
        self._step = 0
        self._calls = 0
        self._closed = False
        self._asked = ""
        self._answers: dict[str, dict[int, Json]] = {}
        self._found = ""  # by the last answers of a first call: which ranks were where
        self._over = 0
        self._stack = ExitStack()

    def begin(self, step: int, end_step: int) -> None:
        """Says that the main thread enters a call of the compiled loop that goes from one step to another.

        Or waits, if both are one step, for the other ranks' callbacks behind it.
        """
        with self._news:
            what = (
                f"the call from step {step} to {end_step}"
                if end_step > step
                else f"the wait for the callbacks of step {step}"
            )
            usual = 2 * self._pace * (end_step - step)
            self._step, self._call = step, _Call(what, time.monotonic(), usual, first=not self._calls)
            self._calls += 1
            self._news.notify_all()

    def reached(self, step: int) -> None:
        """Says that the call has ended at a step."""
        with self._news:
            if self._call and step > self._step:
                pace = (time.monotonic() - self._call.begun) / (step - self._step)
                self._paced += 1
                self._pace = pace if self._paced < 3 else max(pace, self._pace)  # the first call has compiled
            self._call, self._step = None, step
            self._news.notify_all()

    def report(self, why: str) -> None:
        """Lets it be said where every rank is; from any thread, without waiting."""
        self._ask(secrets.token_hex(8), why)

    def __enter__(self) -> "Watchdog":
        self._group.on_told(TOPIC, self._told)
        threading.Thread(target=self._watch, name=f"stalls-{self._group.rank}", daemon=True).start()
        if signals.can_be_heard() and signals.is_free(signal.SIGUSR1):
            asked = f"SIGUSR1 to rank {self._group.rank}"
            self._stack.enter_context(signals.heard({signal.SIGUSR1: lambda _: self.report(asked)}))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()
        with self._news:
            self._closed, self._call = True, None
            self._news.notify_all()
        self._group.tell(TOPIC, {"over": True})

    def _watch(self) -> None:
        """Waits for a call, then for its limits, the smaller one first."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._call is not None)
                if self._closed:
                    return
                call = self._call
            assert call is not None
            before = 0.0
            for limit in self._limits(call):
                if not self._outlasts(call, limit):
                    break
                # Named after the call, so that ranks which wait in the same one ask once.
                why = f"{call.what} has lasted {limit + call.usual:.3g} s on rank {self._group.rank}"
                self._ask(f"{call.what} {limit}", why, first=call.first and not before < self._shutdown <= limit)
                before = limit
            if self._shutdown and not call.first and self._outlasts(call, self._shutdown + 2 * ANSWER_SECONDS):
                lasted = self._shutdown + call.usual
                why = f"{call.what} has lasted {lasted:.3g} s, as long as --stall_shutdown_seconds allows"
                self._group.tell(TOPIC, {"end": why})
            self._outlasts(call, float("inf"))

    def _limits(self, call: _Call) -> Iterable[float]:
        """After how many seconds beyond what is usual the ranks are asked."""
        if call.first and self._warning:
            return itertools.count(self._warning, self._warning)
        return sorted({self._warning, self._shutdown} - {0.0})

    def _outlasts(self, call: "_Call", limit: float) -> bool:
        """Returns whether a call is still the one that runs, when it has lasted so many seconds beyond what is usual.

        Time in which this process was stopped, as by Ctrl-Z, does not count.
        """
        with self._news:
            while call.lasted < limit + call.usual:
                piece = min(_PIECE_SECONDS, limit + call.usual - call.lasted)
                if self._news.wait_for(lambda: self._closed or self._call is not call, piece):
                    return False
                call.lasted += piece
            return self._call is call and not self._closed

    def _ask(self, name: str, why: str, first: bool = False) -> None:
        self._group.tell(TOPIC, {"ask": name, "why": why, "first": first})

    def _told(self, said: Any) -> bool:
        """On every rank, in one order."""
        if "ask" in said:
            if said["ask"] != self._asked:
                self._asked = said["ask"]
                self._answer(said)
        elif "answer" in said:
            self._answers.setdefault(said["answer"], {})[said["rank"]] = said["where"]
        elif "end" in said:
            rank = f"rank {self._group.rank} of {self._group.size}"
            self._say(f"{rank}: {said['end']}. Ending with code {ExitCode.STALLED:d}.")
            # Beside this thread, for which `leave` would wait: longer than a watch waits for this process's own word.
            farewell = threading.Thread(target=self._group.leave, args=(ExitCode.STALLED, said["end"]), daemon=True)
            farewell.start()
            farewell.join(_FAREWELL_SECONDS)
            self._end(ExitCode.STALLED)
        else:
            self._over += 1
        return self._over == self._group.size

    def _answer(self, asked: Any) -> None:
        timer = threading.Timer(ANSWER_SECONDS, self._say_all, [asked])
        timer.daemon = True
        timer.start()
        self._group.tell(TOPIC, {"answer": asked["ask"], "rank": self._group.rank, "where": self._where()})

    def _where(self) -> Json:
        call = self._call
        doing = call and [call.what, time.monotonic() - call.begun]
        return {"step": self._step, "call": doing, "stack": main_stack()}

    def _say_all(self, asked: Any) -> None:
        """What one rank says: the ranks that have arrived in the call, those that have not, and those that are silent."""
        answers = self._answers.pop(asked["ask"], {})
        arrived = [rank for rank, where in sorted(answers.items()) if where["call"]]
        elsewhere = [rank for rank, where in sorted(answers.items()) if not where["call"]]
        silent = [rank for rank in range(self._group.size) if rank not in answers]
        kinds = {"in a call": arrived, "not in a call": elsewhere, "no answer": silent}
        summary = "; ".join(f"{kind}: {', '.join(map(str, ranks))}" for kind, ranks in kinds.items() if ranks)
        speakers = list(answers)
        if asked["first"]:
            # One that is in it: who has just come to the run hears what was asked before, with answers of then.
            is_news = len(arrived) < self._group.size and summary != self._found
            speakers, self._found = arrived if is_news else [], summary
        if min(speakers, default=None) != self._group.rank:
            return
        lines = [f"Where the ranks are ({asked['why']}). {summary}."]
        for rank, where in sorted(answers.items()):
            call = where["call"]
            doing = f"for {call[1]:.1f} s in {call[0]}" if call else "between two calls"
            lines += [f"rank {rank}: step {where['step']}, {doing}", *(f"  {frame}" for frame in where["stack"])]
        self._say("\n".join(lines))
