"""One job from its first process to its last: what `launch` and `spawn` both do."""

import contextlib
import dataclasses
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfdist import endings
from tfdist.cluster import without_sources
from tfdist.errors import ExitCode
from tfdist.group import Group, Server
from tfdist.group.addresses import join_address, listen, split_address
from tfdist.group.contract import name_ranks
from tfdist.group.joining import ADDRESS_VARIABLE, TOKEN_VARIABLE
from tfdist.launching import nodes
from tfdist.launching.child import Child, Task
from tfdist.launching.console import Channel, Screen
from tfdist.launching.engines import ENGINES
from tfdist.launching.guard import Guard
from tfdist.launching.job import Job
from tfdist.launching.logs import log_directory
from tfdist.launching.outcome import Outcome
from tfdist.launching.placement import Placement, arrange
from tfdist.launching.supervision import Stop, Supervisor, Watched

Ask = Callable[[], Stop | None]
PATIENCE_SECONDS = 30.0  # for the processes to end, and save what they want, when somebody asks for the end
_OURS = (ADDRESS_VARIABLE, TOKEN_VARIABLE, "TFDIST_COORDINATOR")


def run(
    job: Job,
    command: Callable[[int], Sequence[str]],
    environment: Mapping[str, str],
    *,
    stops: Sequence[Ask] = (),
    interrupts: contextlib.AbstractContextManager[list[int]] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Starts a job's processes on this host, and sees them to their end.

    Args:
      job: how many, and how they find each other.
      command: what a rank runs.
      environment: what they inherit; the variables that say who a process is are replaced.
      stops: each is asked again and again for a reason to end the processes.
      interrupts: collects the signals that ask for the end while processes run, as `signals.received()` does; outside
        of it they do what they always do. None where they are others' affair.
      say: told where the logs are.

    Raises:
      PeerLostError: another host's launcher did not come.
      InputError: the command, the log directory or the coordinator's address cannot be used.
    """
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(Guard())
        launchers = stack.enter_context(nodes.launchers(job, environment))
        logs = log_directory(job.log_dir, launchers)
        placement = arrange(job.processes, job.coordinator, launchers)
        server, variables = stack.enter_context(_served(job, placement, launchers))
        inherited = _inherited(environment)
        tasks = [
            Task(one.rank, command(one.rank), inherited | own, logs / f"rank-{one.rank}.log")
            for one, own in zip(placement.ranks(), variables, strict=True)
        ]
        say(f"{name_ranks([task.rank for task in tasks])} of {placement.size}, logs in {logs}")
        watched = Watched(
            stops=[*stops, _start_timeout(job, server), _elsewhere(launchers)],
            loss=lambda: server.loss if server else None,
            on_stop=lambda outcome: launchers.leave(outcome.code, outcome.reason),
        )
        with interrupts or contextlib.nullcontext([]) as arrived:
            outcome = _supervise(tasks, guard, watched, arrived, stack)
        outcome = nodes.conclude(launchers, outcome)
        log = next((task.log for task in tasks if task.rank == outcome.rank), None)
        return dataclasses.replace(outcome, log=log)


@contextlib.contextmanager
def _served(job: Job, placement: Placement, launchers: Group) -> Iterator[tuple[Server | None, list[dict[str, str]]]]:
    """Serves on node 0 what the ranks need; returns the ranks' group, where it is here, and this node's variables."""
    engine = ENGINES[job.launcher]
    with contextlib.ExitStack() as stack:
        server, told = None, None
        if launchers.rank == 0:
            token = secrets.token_hex(16)
            host = placement.hosts[0]
            listener = listen(join_address(host, 0), "Choose another --coordinator, the same on every host.")
            server = Server(listener, size=placement.size, token=token)
            stack.callback(server.close, "the launcher has ended")
            port = split_address(server.address)[1]
            told = [join_address(host, port), token, stack.enter_context(engine.serve(placement))]
        address, token, engine_port = launchers.broadcast("launch/served", told)
        group = {ADDRESS_VARIABLE: address, TOKEN_VARIABLE: token}
        yield server, [group | engine.variables(placement, engine_port, rank) for rank in placement.ranks()]


def _supervise(
    tasks: Sequence[Task], guard: Guard, watched: Watched, arrived: list[int], stack: contextlib.ExitStack
) -> Outcome:
    screens = Screen(sys.stdout), Screen(sys.stderr)
    children: list[Child] = []
    channels: list[Channel] = []
    try:
        for task in tasks:
            log = stack.enter_context(open(task.log, "wb", buffering=0))
            child = Child(task)
            guard.add(child.pid)
            children.append(child)
            channels += [
                Channel(child.rank, child.out, screens[0], log),
                Channel(child.rank, child.err, screens[1], log),
            ]
    except BaseException:
        for child in children:
            child.reap()
        raise
    stops = [*watched.stops, lambda: _unread(screens), lambda: _asked(arrived)]
    watched = watched._replace(stops=stops, hurry=lambda: len(arrived) > 1)
    try:
        return Supervisor(children, channels, watched).run()
    finally:
        for child in children:
            guard.forget(child.pid)


def _unread(screens: Sequence[Screen]) -> Stop | None:
    if any(screen.gone for screen in screens):
        return Stop(Outcome(endings.SIGNALLED + signal.SIGPIPE, "nobody reads the output any more"))
    return None


def _asked(arrived: Sequence[int]) -> Stop | None:
    if not arrived:
        return None
    name = signal.Signals(arrived[0]).name
    return Stop(Outcome(endings.SIGNALLED + arrived[0], f"ended by {name}"), PATIENCE_SECONDS, asked=True)


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in without_sources(environment).items() if name not in _OURS}
    return {"PYTHONUNBUFFERED": "1"} | kept  # lines appear when they are printed, also the last before a crash


def _start_timeout(job: Job, server: Server | None) -> Ask:
    """Once a rank has come to the group, the others must come too; a job whose ranks do not use tfdist has no group."""
    first_came = 0.0

    def ask() -> Stop | None:
        nonlocal first_came
        absent = server.absent() if server else []
        if not absent or not server or len(absent) == server.size:
            return None
        now = time.monotonic()
        first_came = first_came or now
        if now - first_came < job.start_timeout_seconds:
            return None
        who = name_ranks(absent)
        reason = f"{who} did not join the job's group within {job.start_timeout_seconds:g} s (--start_timeout_seconds)"
        return Stop(Outcome(ExitCode.PEER_LOST, reason, absent[0]))

    return ask


def _elsewhere(launchers: Group) -> Ask:
    def ask() -> Stop | None:
        outcome = nodes.elsewhere(launchers)
        return Stop(outcome) if outcome else None

    return ask
