"""Runs an attempt of a job on this host until all its processes have ended."""

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator, Sequence

from tfdist.cluster import progress_file, terminal
from tfdist.cluster.environment import without_rank_variables
from tfdist.cluster.terminal import StatusLine
from tfdist.coordination import Group, Server
from tfdist.coordination.group import name_ranks
from tfdist.coordination.job_token import TOKEN_VARIABLE, join_address, listen, split_address
from tfdist.coordination.join import ADDRESS_VARIABLE, ELASTIC_VARIABLE
from tfdist.errors import SIGNAL_OFFSET, ExitCode
from tfdist.launcher import orders
from tfdist.launcher.child import EVALUATOR_RANK, Child, Task
from tfdist.launcher.engine_environment import ENGINES, evaluator_variables
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.order_sources import OrderSource, is_request, lost_launcher
from tfdist.launcher.orders import Order, OrderKind, Report
from tfdist.launcher.output_forwarding import Channel, Log, Screen, prefix
from tfdist.launcher.placement import Placement, place_processes
from tfdist.launcher.supervision import Host, Stop, StopCheck, Supervisor

RESTART_VARIABLE = "TFDIST_RESTART"  # number of earlier attempts at this job
JOB_NAME_VARIABLE = "TFDIST_LAUNCHED"  # name of the job, with its start time, for the names of its output
_LAUNCHER_VARIABLES = (
    ADDRESS_VARIABLE,
    TOKEN_VARIABLE,
    RESTART_VARIABLE,
    ELASTIC_VARIABLE,
    progress_file.VARIABLE,
    terminal.COLUMNS_VARIABLE,
    "TFDIST_COORDINATOR",
)


def run_attempt(host: Host, order_source: OrderSource, order: Order, is_first: bool) -> Report:
    """Starts the processes with new ports and a new group, and waits until all have ended.

    Raises:
      InputError: the command or the coordinator's address is invalid, or there is no free memory.
    """
    with order_source.launchers(order) as launchers, contextlib.ExitStack() as stack:
        placement = place_processes(order.processes, order_source.host, launchers, host.job.servers)
        server, variables = stack.enter_context(_serve_group(host.job, placement, launchers))
        tasks = _create_tasks(host, placement, variables, order)
        ranks = [task.rank for task in tasks if task.rank != EVALUATOR_RANK]
        if is_first:
            evaluator = ", an evaluator" if len(tasks) > len(ranks) else ""
            host.say(f"{name_ranks(ranks)} of {placement.size}{evaluator}, logs in {host.logs}")
            port_warning = ENGINES[host.job.launcher].port_warning
            if port_warning and not host.job.servers:
                host.say(port_warning)
        timeout = _StartTimeout(host.job.start_timeout_seconds, server)
        rejoin = _RejoinCheck(host.job, server, order.attempt)
        stops: list[StopCheck] = [*host.stops, timeout, lambda: _check_launchers(host, launchers)]
        stops += [lambda: _check_orders(host, order_source), rejoin]
        report = _supervise(host, tasks, stops, launchers, server, stack, order.attempt)
    outcome = rejoin.outcome(report.outcome)
    log = next((task.log for task in tasks if task.rank == outcome.rank), None)
    step, final = host.progress_files.read(ranks) if host.progress_files else (None, False)
    outcome = dataclasses.replace(outcome, log=log)
    return report._replace(outcome=outcome, step=step, final=final, absent=timeout.absent_ranks)


@contextlib.contextmanager
def _serve_group(
    job: Job, placement: Placement, launchers: Group
) -> Iterator[tuple[Server | None, list[dict[str, str]]]]:
    """Starts the ranks' servers on node 0; yields their group's server (None on other nodes) and the ranks' variables."""
    engine = ENGINES[job.launcher]
    with contextlib.ExitStack() as stack:
        server, endpoint = None, None
        if launchers.rank == 0:
            host = placement.hosts[0]
            listener = listen(join_address(host, 0), "Choose another --coordinator, the same on every host.")
            server = Server(listener, size=placement.size, token=launchers.token_for("ranks"))
            stack.callback(server.close, "the launcher has ended")
            port = split_address(server.address)[1]
            endpoint = [join_address(host, port), stack.enter_context(engine.serve(placement))]
        address, engine_port = launchers.broadcast("launch/served", endpoint)
        group = {ADDRESS_VARIABLE: address, TOKEN_VARIABLE: launchers.token_for("ranks")}
        yield server, [group | engine.variables(placement, engine_port, rank) for rank in placement.ranks()]


def _create_tasks(host: Host, placement: Placement, variables: Sequence[dict[str, str]], order: Order) -> list[Task]:
    inherited = {k: v for k, v in without_rank_variables(host.environment).items() if k not in _LAUNCHER_VARIABLES}
    job_environment = {"PYTHONUNBUFFERED": "1"} | inherited  # prints the last lines before a crash
    job_environment |= {RESTART_VARIABLE: str(order.attempt), JOB_NAME_VARIABLE: order.job_name}
    if host.job.is_elastic:
        job_environment[ELASTIC_VARIABLE] = "1"
    tasks = []
    for rank, rank_variables in zip(placement.ranks(), variables, strict=True):
        environment = job_environment | rank_variables
        if host.progress_files:
            environment[progress_file.VARIABLE] = str(host.progress_files.create(rank))
        if rank == 0 and (columns := terminal.columns_of(sys.stderr)):
            width = max(columns - len(prefix(rank)), 1)  # the last state of a progress bar remains as a line
            environment[terminal.COLUMNS_VARIABLE] = str(width)
        tasks.append(Task(rank, host.command(rank), environment, host.logs / f"rank-{rank}.log"))
    if host.job.evaluator and placement.node == 0:
        environment = job_environment | evaluator_variables(placement)
        tasks.append(Task(EVALUATOR_RANK, host.command(0), environment, host.logs / "evaluator.log"))
    return tasks


def _supervise(
    host: Host,
    tasks: Sequence[Task],
    stops: Sequence[StopCheck],
    launchers: Group,
    server: Server | None,
    stack: contextlib.ExitStack,
    attempt_number: int,
) -> Report:
    status = StatusLine(sys.stderr) if terminal.columns_of(sys.stderr) else None
    screens = (
        Screen(sys.stdout, status if terminal.is_terminal(sys.stdout) else None),
        Screen(sys.stderr, status),
    )
    children: list[Child] = []
    channels: list[Channel] = []
    try:
        for task in tasks:
            log = stack.enter_context(contextlib.closing(Log(task.log, attempt_number)))
            child = Child(task)
            children.append(child)
            host.guard.add(child.pid)
            channels += [
                Channel(child.rank, child.out, screens[0], log),
                Channel(child.rank, child.err, screens[1], log, None if child.rank else status),
            ]
    except BaseException:
        for child in children:
            child.reap()
        raise
    stops = [*stops, host.stop_requested, lambda: _check_output(host, screens)]
    supervisor = Supervisor(host, children, channels, launchers, server, stops)
    try:
        outcome = supervisor.run()
        failures = orders.count_local_failures([child for child in children if child.rank != EVALUATOR_RANK], outcome)
        return Report(outcome, supervisor.is_stopped or bool(host.received_signals), failures)
    finally:
        for child in children:
            host.guard.forget(child.pid)
        host.guard.sweep()


def _check_output(host: Host, screens: Sequence[Screen]) -> Stop | None:
    outcome = Outcome(SIGNAL_OFFSET + signal.SIGPIPE, "the output is no longer read")
    return Stop(outcome, host.job.grace_seconds) if any(screen.is_broken for screen in screens) else None


class _StartTimeout:
    """A check that all ranks join the group within a time limit after the first rank.

    Ranks that do not use tfdist never join the group, and have no time limit.

    Attributes:
      absent_ranks: the ranks that did not join in time.
    """

    def __init__(self, seconds: float, server: Server | None):
        self._seconds, self._server = seconds, server
        self._first_join = 0.0
        self.absent_ranks: Sequence[int] = ()

    def __call__(self) -> Stop | None:
        absent_ranks = self._server.absent_ranks() if self._server else []
        if not absent_ranks or not self._server or len(absent_ranks) == self._server.size:
            return None
        now = time.monotonic()
        self._first_join = self._first_join or now
        if now - self._first_join < self._seconds:
            return None
        self.absent_ranks = absent_ranks
        reason = f"{name_ranks(absent_ranks)} did not join the job's group within {self._seconds:g} s (--start_timeout_seconds)"
        return Stop(Outcome(ExitCode.PEER_LOST, reason, absent_ranks[0]), is_final=False)


class _RejoinCheck:
    """A check that stops the processes some time after a tolerated loss, to restart them with the lost process.

    The processes save before they end.
    """

    def __init__(self, job: Job, server: Server | None, attempt_number: int):
        self._job, self._server = job, server
        self._can_restart = attempt_number < job.restart_budget
        self._first_loss = 0.0
        self._lost_ranks: list[int] = []

    def __call__(self) -> Stop | None:
        server = self._server
        if not (server and server.departed_members and server.has_members and self._can_restart):
            return None
        now = time.monotonic()
        self._first_loss = self._first_loss or now
        if now - self._first_loss < self._job.rejoin_seconds:
            return None
        self._lost_ranks = sorted(server.departed_members)
        outcome = Outcome(
            ExitCode.PREEMPTED, f"the processes stop so that {name_ranks(self._lost_ranks)} can be restarted"
        )
        return Stop(outcome, self._job.grace_seconds, is_requested=True, is_final=False)

    def outcome(self, attempt_outcome: Outcome) -> Outcome:
        """Returns the outcome of the attempt: the loss, which uses up a restart, if all processes have saved as requested."""
        if not self._lost_ranks or attempt_outcome.code != ExitCode.PREEMPTED:
            return attempt_outcome
        return Outcome(
            ExitCode.PEER_LOST,
            f"{name_ranks(self._lost_ranks)} was lost, and the others have saved",
            self._lost_ranks[0],
        )


def _check_orders(host: Host, order_source: OrderSource) -> Stop | None:
    """Checks for an order to stop, which makes the processes save before the job is resized."""
    order = order_source.order()
    if order.kind not in (OrderKind.STOP, OrderKind.OVER):  # OVER if the controller has abandoned this launcher
        return None
    if order.outcome.code == ExitCode.PEER_LOST:  # the processes cannot save
        return Stop(order.outcome, is_final=False)
    return Stop(order.outcome, host.job.grace_seconds, is_requested=True, is_final=False)


def _check_launchers(host: Host, launchers: Group) -> Stop | None:
    """Checks whether launchers of other hosts have ended.

    If the end of another launcher was requested, or its output was closed, all ranks agree on a step at which to end. The
    ranks on this host then need time to save. They must not receive a signal, which would kill them.
    """
    loss_outcome = lost_launcher(launchers)
    if loss_outcome and is_request(loss_outcome.code):
        return Stop(loss_outcome, is_requested=True, is_final=False, sigterm_delay_seconds=host.job.grace_seconds)
    return Stop(loss_outcome, is_final=False) if loss_outcome else None
