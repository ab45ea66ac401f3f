"""Runs a job, also for callers that take its results instead of its output."""

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

from tfdist.checkpoint import in_memory
from tfdist.errors import ExitCode, InputError, PeerLostError
from tfdist.launcher.attempt import Ask, Host, asked, attempt, is_repeated_request
from tfdist.launcher.bootstrap import opened
from tfdist.launcher.child import NewProcess, Start
from tfdist.launcher.job import SUCCESS, Job, Outcome
from tfdist.launcher.order_sources import OrderSource
from tfdist.launcher.orders import Order, OrderKind, Report
from tfdist.launcher.orphan_guard import OrphanGuard
from tfdist.launcher.output_forwarding import ProgressFiles, log_directory
from tfdist.launcher.supervision import POLL_SECONDS

MEMORY = "/dev/shm"  # on Linux


def run(
    job: Job,
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    *,
    start: Start = NewProcess,
    stops: Sequence[Ask] = (),
    interrupts: contextlib.AbstractContextManager[list[int]] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Runs a job's processes on this host until they have ended, with restarts as configured.

    Args:
      job: number of processes, and how they find each other.
      command: returns the command of a rank.
      environment: environment that the processes inherit; variables that identify a process are replaced.
      start: starts a process.
      stops: polled for a reason to end the processes.
      interrupts: collects the signals that request the end while processes run, as `signals.received()` does; outside
        of it they have their usual effect. None if the caller handles them.
      say: called with the location of the logs, and about restarts.

    Returns:
      How the last attempt ended.

    Raises:
      PeerLostError: another host's launcher did not connect.
      InputError: the command, the log directory, the memory or the coordinator's address cannot be used.
    """
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(OrphanGuard())
        order_source = stack.enter_context(opened(job, environment, guard, say))
        logs = log_directory(job.log_dir, order_source.everyone)
        memory = stack.enter_context(_memory(guard))
        # Needed to know whether a failure repeats, whether training had begun at a preemption, and whether a launcher
        # fits.
        is_noted = job.restart_budget or job.preemption_budget or job.is_elastic
        notes = ProgressFiles(memory) if is_noted else None
        own = {in_memory.VARIABLE: str(memory / "commits"), **guard.variables}
        inherited = {name: value for name, value in environment.items() if name != in_memory.VARIABLE}
        with interrupts or contextlib.nullcontext([]) as arrived:
            outcome = _until_over(
                Host(job, command, inherited | own, start, guard, logs, notes, stops, arrived, say), order_source
            )
        return order_source.conclude(outcome)


def _until_over(host: Host, order_source: OrderSource) -> Outcome:
    """Follows orders until the job is over."""
    last = SUCCESS
    begun = False
    while (order := order_source.order()).kind != OrderKind.OVER:
        stop = asked(host)
        if order.kind == OrderKind.STOP:  # the order to run was replaced before it was seen
            order_source.report(Report(order.outcome))
        elif order.kind == OrderKind.RUN and stop:
            order_source.report(Report(stop.outcome, stopped=True))
        elif order.kind == OrderKind.RUN:
            report = _attempt(host, order_source, order, is_first=not begun)
            begun, last = True, report.outcome
            order_source.report(report)
        else:
            if stop:  # a preempted run stays preempted, because it has saved
                order_source.end(
                    last if last.code == ExitCode.PREEMPTED else stop.outcome, at_once=is_repeated_request(host)
                )
            time.sleep(POLL_SECONDS)
    return order.outcome


def _attempt(host: Host, order_source: OrderSource, order: Order, is_first: bool) -> Report:
    try:
        return attempt(host, order_source, order, is_first)
    except PeerLostError as error:  # another launcher was lost before the processes began
        return Report(Outcome(error.exit_code, str(error).rstrip(".")))


@contextlib.contextmanager
def _memory(guard: OrphanGuard) -> Iterator[pathlib.Path]:
    """Yields a directory, in memory if possible, for data that outlives an attempt's processes but not the job."""
    home = MEMORY if os.access(MEMORY, os.W_OK) else None
    with contextlib.ExitStack() as stack:
        try:
            made = tempfile.TemporaryDirectory(prefix="tfdist-launch-", dir=home, ignore_cleanup_errors=True)
            path = stack.enter_context(made)
            os.mkdir(os.path.join(path, "commits"))
        except OSError as error:
            raise InputError(
                f"A launcher needs a directory for files that outlive its processes. Received: {home or 'TMPDIR'} "
                f"({error.strerror}). Free space there."
            ) from error
        guard.add_directory(path)
        yield pathlib.Path(path)


_GRACE_SECONDS = 1.0


class CapturedJobs:
    """Runs jobs, one after the other; no process and no file is left at its end."""

    def __init__(self, prefix: str):
        """Initializes without a process; `prefix`: beginning of the name of the temporary directory."""
        self._prefix = prefix

    def __enter__(self) -> "CapturedJobs":
        with contextlib.ExitStack() as stack:
            guard = stack.enter_context(OrphanGuard())  # cleans up if this process is killed
            self._directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=self._prefix))
            guard.add_directory(self._directory)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def new_directory(self) -> Iterator[pathlib.Path]:
        """Context of a new directory for the files of a job, which is removed on exit: the files may be large."""
        with tempfile.TemporaryDirectory(dir=self._directory, ignore_cleanup_errors=True) as directory:
            yield pathlib.Path(directory)

    def run(
        self,
        job: Job,
        logs: pathlib.Path,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        stops: Sequence[Ask],
        start: Start = NewProcess,
    ) -> Outcome:
        """Runs a job until its end, see `job_runner.run`.

        Args:
          job: the processes.
          logs: directory of their output, for `log_dir` of the job.
          command: returns the command of a rank.
          environment: environment that the processes inherit.
          stops: polled for a reason to end the processes.
          start: starts a process.
        """
        job = dataclasses.replace(job, log_dir=str(logs), grace_seconds=_GRACE_SECONDS)
        shown = io.StringIO()  # the logs have it as well
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            return run(job, command, environment, start=start, stops=stops)


def last_line(log: str) -> str:
    """Returns the last line that a process has printed, without the name of its command; empty if there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return re.sub(r"^tfdist \w+( \w+)?: ", "", last)


def read_log(path: pathlib.Path | None) -> str:
    """Returns what a process has printed; empty if there is no such file."""
    return path.read_text(encoding="utf-8", errors="replace") if path and path.exists() else ""
