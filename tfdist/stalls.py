"""Hangs of a run: which ranks are in the call that does not end, where each one is, and an end with code 4."""

import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tfdist.errors import ExitCode
from tfdist.group import Group, Json

TOPIC = "stalls"
ANSWER_SECONDS = 2.0  # who has not answered by then is stopped, or holds Python's lock
_FRAMES = 8  # innermost calls of Python that are shown


class Stalls:
    """Watches the calls of one run's compiled loop, on every rank; a context manager around the run.

    The main thread says when it enters a call (`begin`) and when it has left it (`reached`). A thread beside it notices a
    call that lasts too long, and asks all ranks over the group, which works while collectives hang: each answers from
    a thread, and rank 0 says what they answered. Nothing is sent as long as calls end in time.

    The first call, in which everything is compiled, may last as long as it wants.
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
          warning_seconds: a call that lasts longer is reported, once; 0 for never.
          shutdown_seconds: a call that lasts longer ends the job; 0 for never.
          say: gets the report, on rank 0.
          end: ends the process with a code.
        """
        self._group, self._say, self._end = group, say, end
        self._limits = {"warning": warning_seconds, "shutdown": shutdown_seconds}
        self._main = threading.main_thread().ident
        self._news = threading.Condition()  # around what follows
        self._call: tuple[int, int, float] | None = None  # first step, last step and begin of the call that runs
        self._step = 0
        self._calls = 0
        self._closed = False
        self._answers: dict[str, dict[int, Json]] = {}
        self._over = 0

    def begin(self, step: int, end_step: int) -> None:
        """Says that the main thread enters a call of the compiled loop that goes from one step to another."""
        with self._news:
            self._step, self._call = step, (step, end_step, time.monotonic())
            self._calls += 1
            self._news.notify_all()

    def reached(self, step: int) -> None:
        """Says that the call has ended at a step."""
        with self._news:
            self._call, self._step = None, step
            self._news.notify_all()

    def report(self, why: str) -> None:
        """Lets rank 0 say where every rank is; from any thread, without waiting."""
        self._group.tell(TOPIC, {"ask": secrets.token_hex(8), "by": self._group.rank, "why": why})

    def __enter__(self) -> "Stalls":
        self._group.on_told(TOPIC, self._told)
        threading.Thread(target=self._watch, name=f"stalls-{self._group.rank}", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._news:
            self._closed, self._call = True, None
            self._news.notify_all()
        self._group.tell(TOPIC, {"over": True})

    def _watch(self) -> None:
        """Waits for a call, then for its limits, the smaller one first."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or (self._call is not None and self._calls > 1))
                if self._closed:
                    return
                call = self._call
            assert call is not None
            for name, limit in sorted(self._limits.items(), key=lambda item: item[1]):
                if limit and self._outlasts(call, limit):
                    self._act(name, call, limit)
            self._outlasts(call, float("inf"))

    def _outlasts(self, call: tuple[int, int, float], limit: float) -> bool:
        """Returns whether a call is still the one that runs, when it has lasted so many seconds."""
        with self._news:
            left = None if limit == float("inf") else max(0.0, call[2] + limit - time.monotonic())
            return not self._news.wait_for(lambda: self._closed or self._call is not call, left)

    def _act(self, limit: str, call: tuple[int, int, float], seconds: float) -> None:
        what = f"the call from step {call[0]} to {call[1]} has lasted {seconds:g} s"
        if limit == "warning":
            self.report(f"{what} on rank {self._group.rank}")
        else:
            self._group.tell(TOPIC, {"end": f"{what}, as long as --stall_shutdown_seconds allows"})

    def _told(self, said: Any) -> bool:
        """On every rank, in one order."""
        if "ask" in said:
            if self._group.rank == 0:
                threading.Timer(ANSWER_SECONDS, self._tell_all, [said]).start()
            self._group.tell(TOPIC, {"answer": said["ask"], "rank": self._group.rank, "where": self._where()})
        elif "answer" in said:
            self._answers.setdefault(said["answer"], {})[said["rank"]] = said["where"]
        elif "end" in said:
            self._say_once(f"Stalled: {said['end']}. Ending with code {ExitCode.STALLED:d}.")
            self._group.leave(ExitCode.STALLED, said["end"])
            self._end(ExitCode.STALLED)
        else:
            self._over += 1
        return self._over == self._group.size

    def _say_once(self, line: str) -> None:
        if self._group.rank == 0:
            self._say(line)

    def _where(self) -> Json:
        call, frames = self._call, sys._current_frames().get(self._main or 0)
        stack = traceback.extract_stack(frames)[-_FRAMES:] if frames else []
        return {
            "step": self._step,
            "call": call and [call[0], call[1], time.monotonic() - call[2]],
            "stack": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack],
        }

    def _tell_all(self, asked: Any) -> None:
        """What rank 0 says: the ranks that have arrived in the call, those that have not, and those that are silent."""
        answers = self._answers.pop(asked["ask"], {})
        arrived = [rank for rank, where in sorted(answers.items()) if where["call"]]
        elsewhere = [rank for rank, where in sorted(answers.items()) if not where["call"]]
        silent = [rank for rank in range(self._group.size) if rank not in answers]
        kinds = {"in a call": arrived, "not in a call": elsewhere, "no answer": silent}
        summary = "; ".join(f"{kind}: {', '.join(map(str, ranks))}" for kind, ranks in kinds.items() if ranks)
        lines = [f"Where the ranks are ({asked['why']}). {summary}."]
        for rank, where in sorted(answers.items()):
            call = where["call"]
            doing = f"for {call[2]:.1f} s in the call from step {call[0]} to {call[1]}" if call else "between two calls"
            lines += [f"rank {rank}: step {where['step']}, {doing}", *(f"  {frame}" for frame in where["stack"])]
        self._say("\n".join(lines))
