"""One attempt at a job: runs its processes on this host until all have ended."""

import contextlib
import dataclasses
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfdist.cluster import progress_file, terminal
from tfdist.cluster.environment import without_sources
from tfdist.coordination import Group, Server
from tfdist.coordination.group import name_ranks
from tfdist.coordination.job_token import TOKEN_VARIABLE, join_address, listen, split_address
from tfdist.coordination.join import ADDRESS_VARIABLE, ELASTIC_VARIABLE
from tfdist.coordination.messages import nonce
from tfdist.errors import ExitCode, exceptions
from tfdist.launcher import node_group, orders
from tfdist.launcher.child import Child, Start, Task
from tfdist.launcher.engine_environment import ENGINES
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.order_sources import OrderSource
from tfdist.launcher.orders import Order, OrderKind, Report
from tfdist.launcher.orphan_guard import OrphanGuard
from tfdist.launcher.output_forwarding import Channel, Log, ProgressFiles, Screen, prefix
from tfdist.launcher.placement import Placement, place_processes
from tfdist.launcher.supervision import Stop, Supervisor, Watched

Ask = Callable[[], Stop | None]
RESTART_VARIABLE = "TFDIST_RESTART"  # number of earlier attempts at this job
LAUNCHED_VARIABLE = "TFDIST_LAUNCHED"  # name of the job by its start time, used to name its output
_OURS = (
    ADDRESS_VARIABLE,
    TOKEN_VARIABLE,
    RESTART_VARIABLE,
    ELASTIC_VARIABLE,
    progress_file.VARIABLE,
    terminal.LAUNCHER_VARIABLE,
    "TFDIST_COORDINATOR",
)


@dataclasses.dataclass(frozen=True)
class Host:
    """State that all attempts of a job share on this host.

    Attributes:
      job: number of processes, and how they find each other.
      command: returns the command of a rank.
      environment: environment that the processes inherit.
      start: starts a process.
      guard: kills the remaining processes if this process is killed.
      logs: directory of the ranks' logs.
      notes: the ranks' progress files; None if progress is not needed.
      stops: polled for a reason to end the processes.
      arrived: received signals that request the end.
      say: called with a line that lists the local ranks.
    """

    job: Job
    command: Callable[[int], Sequence[str]]
    environment: Mapping[str, str]
    start: Start
    guard: OrphanGuard
    logs: pathlib.Path
    notes: ProgressFiles | None
    stops: Sequence[Ask]
    arrived: Sequence[int]
    say: Callable[[str], None]


def attempt(host: Host, order_source: OrderSource, order: Order, is_first: bool) -> Report:
    """Starts the processes with new ports and a new group, and waits until all have ended.

    Args:
      host: state that all attempts share.
      order_source: may order to stop.
      order: number of processes, and number of the attempt.
      is_first: whether it is this launcher's first attempt.

    Returns:
      How the attempt ended.

    Raises:
      InputError: the command or the coordinator's address cannot be used, or there is no free memory.
    """
    with order_source.launchers(order) as launchers, contextlib.ExitStack() as stack:
        placement = place_processes(order.processes, order_source.host, launchers)
        server, variables = stack.enter_context(_served(host.job, placement, launchers))
        tasks = _tasks(host, placement, variables, order)
        if is_first:
            host.say(f"{name_ranks([task.rank for task in tasks])} of {placement.size}, logs in {host.logs}")
            exposed = ENGINES[host.job.launcher].exposed
            if exposed and not host.job.isolate:
                host.say(exposed)
        timeout = _StartTimeout(host.job.start_timeout_seconds, server)
        watched = Watched(
            stops=[*host.stops, timeout, _check_launchers(host, launchers), _ordered(host, order_source)],
            loss=lambda: server.loss if server else None,
            on_stop=lambda outcome: _announce(launchers, outcome),
            grace=host.job.grace_seconds,
            together=host.job.is_elastic,
        )
        supervised = _supervise(host, tasks, watched, stack, order.attempt)
    outcome = supervised.outcome
    log = next((task.log for task in tasks if task.rank == outcome.rank), None)
    step, final = host.notes.read(task.rank for task in tasks) if host.notes else (None, False)
    outcome = dataclasses.replace(outcome, log=log)
    return supervised._replace(outcome=outcome, step=step, final=final, absent=tuple(timeout.absent))


def _announce(launchers: Group, failure: Outcome) -> None:
    """Notifies the other launchers before the processes are ended; preempted ones end by themselves, as do the others'."""
    if failure.code != ExitCode.PREEMPTED:
        launchers.leave(failure.code, failure.reason)


@contextlib.contextmanager
def _served(job: Job, placement: Placement, launchers: Group) -> Iterator[tuple[Server | None, list[dict[str, str]]]]:
    """Starts the servers of the ranks on node 0; yields the ranks' group, on node 0 only, and this node's variables."""
    engine = ENGINES[job.launcher]
    with contextlib.ExitStack() as stack:
        server, told = None, None
        if launchers.rank == 0:
            purpose = nonce()
            host = placement.hosts[0]
            listener = listen(join_address(host, 0), "Choose another --coordinator, the same on every host.")
            server = Server(listener, size=placement.size, token=launchers.token_for(purpose))
            stack.callback(server.close, "the launcher has ended")
            port = split_address(server.address)[1]
            told = [join_address(host, port), purpose, stack.enter_context(engine.serve(placement))]
        address, purpose, engine_port = launchers.broadcast("launch/served", told)
        group = {ADDRESS_VARIABLE: address, TOKEN_VARIABLE: launchers.token_for(purpose)}
        yield server, [group | engine.variables(placement, engine_port, rank) for rank in placement.ranks()]


def _tasks(host: Host, placement: Placement, variables: Sequence[dict[str, str]], order: Order) -> list[Task]:
    which = {RESTART_VARIABLE: str(order.attempt), LAUNCHED_VARIABLE: order.launched}
    if host.job.is_elastic:
        which[ELASTIC_VARIABLE] = "1"
    inherited = _inherited(host.environment) | which
    tasks = []
    for one, own in zip(placement.ranks(), variables, strict=True):
        if host.notes and (note := host.notes.blank(one.rank)):
            own = own | {progress_file.VARIABLE: str(note)}
        if one.rank == 0 and (columns := terminal.columns_of(sys.stderr)):
            room = max(columns - len(prefix(one.rank)), 1)  # the last state of a bar remains as a line
            own = own | {terminal.LAUNCHER_VARIABLE: str(room)}
        tasks.append(Task(one.rank, host.command(one.rank), inherited | own, host.logs / f"rank-{one.rank}.log"))
    return tasks


def _supervise(host: Host, tasks: Sequence[Task], watched: Watched, stack: contextlib.ExitStack, number: int) -> Report:
    status = terminal.on_terminal(sys.stderr)
    screens = (
        Screen(sys.stdout, status if terminal.is_terminal(sys.stdout) else None),
        Screen(sys.stderr, status),
    )
    children: list[Child] = []
    channels: list[Channel] = []
    try:
        for task in tasks:
            log = stack.enter_context(Log(task.log, number))
            child = Child(task, host.start)
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
    stops = [*watched.stops, lambda: asked(host), lambda: _unread(host, screens)]
    watched = watched._replace(stops=stops, hurry=lambda: is_repeated_request(host), look=host.guard.look)
    supervisor = Supervisor(children, channels, watched)
    try:
        outcome = supervisor.run()
        return Report(outcome, supervisor.stopped or bool(host.arrived), orders.own(children, outcome))
    finally:
        for child in children:
            host.guard.forget(child.pid)
        host.guard.sweep()


def asked(host: Host) -> Stop | None:
    """Returns a `Stop` if this launcher has received a signal to end."""
    if not host.arrived:
        return None
    name = signal.Signals(host.arrived[0]).name
    outcome = Outcome(exceptions.SIGNALLED + host.arrived[0], f"ended by {name}")
    return Stop(outcome, host.job.grace_seconds, asked=True)


def is_repeated_request(host: Host) -> bool:
    """Returns whether the request to end was repeated."""
    return len(host.arrived) > 1


def _unread(host: Host, screens: Sequence[Screen]) -> Stop | None:
    if any(screen.gone for screen in screens):
        return Stop(
            Outcome(exceptions.SIGNALLED + signal.SIGPIPE, "the output is no longer read"), host.job.grace_seconds
        )
    return None


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in without_sources(environment).items() if name not in _OURS}
    return {"PYTHONUNBUFFERED": "1"} | kept  # prints lines immediately, including the last ones before a crash


class _StartTimeout:
    """Requires all ranks to join the group within a time limit once one has joined.

    A job whose ranks do not use tfdist never joins the group and has no limit.

    Attributes:
      absent: ranks that did not join in time.
    """

    def __init__(self, seconds: float, server: Server | None):
        self._seconds, self._server = seconds, server
        self._first_came = 0.0
        self.absent: list[int] = []

    def __call__(self) -> Stop | None:
        absent = self._server.absent() if self._server else []
        if not absent or not self._server or len(absent) == self._server.size:
            return None
        now = time.monotonic()
        self._first_came = self._first_came or now
        if now - self._first_came < self._seconds:
            return None
        self.absent = absent
        reason = (
            f"{name_ranks(absent)} did not join the job's group within {self._seconds:g} s (--start_timeout_seconds)"
        )
        return Stop(Outcome(ExitCode.PEER_LOST, reason, absent[0]), final=False)


def _ordered(host: Host, order_source: OrderSource) -> Ask:
    """Returns a check for orders to stop, so that the processes save before others join or some leave."""

    def ask() -> Stop | None:
        order = order_source.order()
        if order.kind not in (OrderKind.STOP, OrderKind.OVER):  # OVER if this launcher was given up
            return None
        if order.outcome.code == ExitCode.PEER_LOST:  # nothing can be saved
            return Stop(order.outcome, final=False)
        return Stop(order.outcome, host.job.grace_seconds, asked=True, final=False)

    return ask


def _check_launchers(host: Host, launchers: Group) -> Ask:
    """Returns a check for launchers of other hosts that have ended.

    If another launcher was asked to end, or its output is no longer read, its ranks agree with ours on a step at which
    to end. Ours then need time to save but no signal, which would kill them if it arrived after they have saved.
    """

    def ask() -> Stop | None:
        outcome = node_group.lost_launcher(launchers)
        if outcome and node_group.is_request(outcome.code):
            return Stop(outcome, asked=True, final=False, wait=host.job.grace_seconds)
        return Stop(outcome, final=False) if outcome else None

    return ask
