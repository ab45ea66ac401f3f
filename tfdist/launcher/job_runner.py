"""Runs a job, and optionally captures its output."""

import contextlib
import dataclasses
import errno
import io
import os
import pathlib
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

from tfdist.checkpoint import in_memory
from tfdist.coordination import Group
from tfdist.coordination.job_token import add_token_flags, group_token, job_token, listen, split_address
from tfdist.coordination.join import serve_group, wait_for_members
from tfdist.errors import ExitCode, InputError, PeerLostError, error_summary
from tfdist.launcher.attempt import run_attempt
from tfdist.launcher.hosts import LOOPBACK_NAMES, local_host_names, matches_host, watched_slots
from tfdist.launcher.job import SUCCESS, Job, Outcome
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.order_sources import FixedNodes, LocalController, OrderSource
from tfdist.launcher.orders import OrderKind, Report, new_job_name
from tfdist.launcher.orphan_guard import OrphanGuard, collect_signals
from tfdist.launcher.output_forwarding import ProgressFiles, log_directory
from tfdist.launcher.supervision import POLL_SECONDS, Host, StopCheck

_SHARED_MEMORY = "/dev/shm"  # on Linux


def run(
    job: Job,
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    *,
    stops: Sequence[StopCheck] = (),
    signals: list[int] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Runs a job's processes on this host until they have ended, with restarts as configured.

    Args:
      job: the job.
      command: returns the command of a rank.
      environment: environment of the processes; variables that identify a process are replaced.
      stops: polled for reasons to end the processes.
      signals: list for signals that request the end while processes run, see `orphan_guard.collect_signals`; None if the
        caller handles signals.
      say: called with messages about logs and restarts.

    Returns:
      The outcome of the last attempt.

    Raises:
      PeerLostError: the launcher of another host did not connect.
      InputError: the command, the log directory, the memory or the coordinator's address cannot be used.
    """
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(OrphanGuard())
        order_source = stack.enter_context(open_order_source(job, environment, say))
        logs = log_directory(job.log_dir, order_source.all_launchers)
        memory = stack.enter_context(_memory(guard))
        # Progress shows whether a failure is repeated, and whether training has begun.
        needs_progress = job.restart_budget or job.preemption_budget or job.is_elastic
        progress_files = ProgressFiles(memory) if needs_progress else None
        variables = {**environment, in_memory.DIRECTORY_VARIABLE: str(memory / "commits"), **guard.variables}
        received_signals: Sequence[int] = () if signals is None else signals
        with contextlib.nullcontext() if signals is None else collect_signals(signals):
            host = Host(job, command, variables, guard, logs, progress_files, stops, received_signals, say)
            outcome = _follow_orders(host, order_source)
        return order_source.conclude(outcome)


def _follow_orders(host: Host, order_source: OrderSource) -> Outcome:
    last_outcome, is_first = SUCCESS, True
    while (order := order_source.order()).kind != OrderKind.OVER:
        stop = host.stop_requested()
        if order.kind == OrderKind.STOP:  # replaced the order to run before that was received
            order_source.report(Report(order.outcome))
        elif order.kind == OrderKind.RUN and stop:
            order_source.report(Report(stop.outcome, stopped=True))
        elif order.kind == OrderKind.RUN:
            try:
                report = run_attempt(host, order_source, order, is_first)
            except PeerLostError as error:  # another launcher was lost before the processes began
                report = Report(Outcome(error.exit_code, str(error).rstrip(".")))
            is_first, last_outcome = False, report.outcome
            order_source.report(report)
        else:
            if stop:  # a preempted run stays preempted, because it has saved
                is_preempted = last_outcome.code == ExitCode.PREEMPTED
                order_source.end(last_outcome if is_preempted else stop.outcome, is_immediate=host.has_second_signal)
            time.sleep(POLL_SECONDS)
    return order.outcome


@contextlib.contextmanager
def _fixed_launchers(job: Job, environment: Mapping[str, str]) -> Iterator[Group]:
    """Yields the group of all launchers of a job, which node 0 serves at the coordinator's address."""
    group = serve_group(
        job.coordinator,
        rank=job.node_rank,
        size=job.nodes,
        token=_token(job, environment),
        timeout=job.start_timeout_seconds,
        remedy="Choose another --coordinator, the same on every host.",
        noun="node",
    )
    try:
        yield wait_for_members(group, job.start_timeout_seconds)
    except BaseException as error:
        group.leave(1, error_summary(error))
        raise
    finally:
        group.leave()


@contextlib.contextmanager
def open_order_source(job: Job, environment: Mapping[str, str], say: Callable[[str], object]) -> Iterator[OrderSource]:
    """Yields the order source of this launcher.

    Raises:
      PeerLostError: the launcher of another host did not connect.
      InputError: the coordinator's address or `--hosts` is invalid.
    """
    with contextlib.ExitStack() as stack:
        if job.nodes > 1:
            yield FixedNodes(job, stack.enter_context(_fixed_launchers(job, environment)))
            return
        listener, token = None, ""
        if job.is_elastic and job.coordinator:
            from tfdist.launcher.rendezvous_server import RemoteAgent, RendezvousServer  # late, because they load NumPy

            listener = _listener(job.coordinator)
            token = group_token(_token(job, environment), "launcher", job.coordinator)
            if listener is None:
                yield stack.enter_context(RemoteAgent(job, token))
                return
        host_slots = stack.enter_context(watched_slots(job.hosts)) if job.hosts else lambda: None
        controller = JobController(job, say, host_slots=host_slots, job_name=new_job_name())
        # Created before remote launchers join: the first launcher owns the job.
        local_controller = LocalController(job, controller, token)
        if listener:
            stack.enter_context(RendezvousServer(listener, split_address(job.coordinator)[0], token, controller))
        yield local_controller


def _token(job: Job, environment: Mapping[str, str]) -> str:
    return job_token(add_token_flags(environment, job.token_file, job.insecure), job.coordinator)


def _listener(coordinator: str) -> socket.socket | None:
    """Returns the rendezvous server's socket if this is the first launcher on the coordinator's host, else None."""
    if not is_this_host(split_address(coordinator)[0]):
        return None
    try:
        return listen(coordinator, "Choose another --coordinator, the same on every host.")
    except InputError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            return None  # used by an earlier launcher, or by another program, to which the connection will fail
        raise


def is_this_host(host: str) -> bool:
    """Returns whether a host name or address is this host's; False if it cannot be resolved."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    names = [*LOOPBACK_NAMES, *local_host_names()]
    return any(matches_host(str(info[4][0]).partition("%")[0], names) for info in infos)


@contextlib.contextmanager
def _memory(guard: OrphanGuard) -> Iterator[pathlib.Path]:
    """Yields a directory, in memory if possible, for data that outlives the processes of an attempt."""
    parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    with contextlib.ExitStack() as stack:
        try:
            directory = tempfile.TemporaryDirectory(prefix="tfdist-launch-", dir=parent, ignore_cleanup_errors=True)
            path = stack.enter_context(directory)
            os.mkdir(os.path.join(path, "commits"))
        except OSError as error:
            raise InputError(
                f"A launcher needs a directory for files that outlive its processes. Received: {parent or 'TMPDIR'} "
                f"({error.strerror}). Free up space there."
            ) from error
        guard.add_directory(path)
        yield pathlib.Path(path)


_GRACE_SECONDS = 1.0


class CapturedJobs:
    """Runs jobs, one at a time, with files in a temporary directory; leaves no process and no file behind."""

    def __init__(self, prefix: str):
        self._prefix = prefix  # of the name of the directory

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            guard = stack.enter_context(OrphanGuard())  # cleans up if this process is killed
            self._directory = stack.enter_context(tempfile.TemporaryDirectory(prefix=self._prefix))
            guard.add_directory(self._directory)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def new_directory(self) -> Iterator[pathlib.Path]:
        """Yields a new directory for the files of a job, which may be large; removes it on exit."""
        with tempfile.TemporaryDirectory(dir=self._directory, ignore_cleanup_errors=True) as directory:
            yield pathlib.Path(directory)

    def run(
        self,
        job: Job,
        logs: pathlib.Path,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        stops: Sequence[StopCheck],
    ) -> Outcome:
        """Runs a job like `job_runner.run`, with the output of its processes in the directory `logs`."""
        job = dataclasses.replace(job, log_dir=str(logs), grace_seconds=_GRACE_SECONDS)
        output = io.StringIO()  # discarded; the logs contain it
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return run(job, command, environment, stops=stops)


def last_line(log: str) -> str:
    """Returns the last line of a process's output, without the prefix of its command; empty without output."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return re.sub(r"^tfdist \w+( \w+)?: ", "", lines[-1]) if lines else ""


def read_log(path: pathlib.Path | None) -> str:
    """Returns the output of a process from its log; empty without a log."""
    return path.read_text(encoding="utf-8", errors="replace") if path and path.exists() else ""
