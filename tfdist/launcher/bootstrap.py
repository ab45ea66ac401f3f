"""Creates a launcher's order source: decides whether it controls the job or follows another launcher."""

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Mapping

from tfdist.coordination.addresses import listen, split_address
from tfdist.coordination.job_token import bound
from tfdist.errors import InputError
from tfdist.launcher import node_group
from tfdist.launcher.hosts import LOOPBACK_NAMES, Hosts, is_named, own_names
from tfdist.launcher.job import Job
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.order_sources import FixedNodes, LocalController, OrderSource
from tfdist.launcher.orders import launched_now
from tfdist.launcher.orphan_guard import OrphanGuard
from tfdist.launcher.remote_agent import RemoteAgent
from tfdist.launcher.rendezvous_server import RendezvousServer


@contextlib.contextmanager
def opened(
    job: Job, environment: Mapping[str, str], guard: OrphanGuard, say: Callable[[str], object]
) -> Iterator[OrderSource]:
    """Yields the order source of this launcher.

    Args:
      job: the job to launch.
      environment: contains the token of jobs on several hosts.
      guard: kills the program of `--hosts` if this process is killed.
      say: called with messages about the job.

    Raises:
      PeerLostError: another host's launcher did not connect.
      InputError: the coordinator's address, or `--hosts`, cannot be used.
    """
    with contextlib.ExitStack() as stack:
        if job.nodes > 1:
            yield FixedNodes(job, stack.enter_context(node_group.launchers(job, environment)))
            return
        listener = _listener(job.coordinator) if job.is_elastic and job.coordinator else None
        if job.is_elastic and job.coordinator and listener is None:
            yield stack.enter_context(RemoteAgent(job, _token(job, environment)))
            return
        hosts = stack.enter_context(Hosts(job.hosts, guard)) if job.hosts else None
        controller = JobController(job, say, listed=lambda: hosts.slots if hosts else None, launched=launched_now())
        token = _token(job, environment) if listener else ""
        own = LocalController(
            job, controller, token
        )  # before remote launchers join, because the first one owns the job
        if listener:
            host = split_address(job.coordinator)[0]
            rendezvous_server = stack.enter_context(RendezvousServer(listener, host, token))
            controller.open_group, controller.close_group = rendezvous_server.open_group, rendezvous_server.close_group
            rendezvous_server.open(controller)
        yield own


def _token(job: Job, environment: Mapping[str, str]) -> str:
    return bound(node_group.token(job, environment), "launcher", job.coordinator)


def _listener(coordinator: str) -> socket.socket | None:
    """Returns the rendezvous server's socket if this is the first launcher on the coordinator's host, else None."""
    if not is_here(split_address(coordinator)[0]):
        return None
    try:
        return listen(coordinator, "Choose another --coordinator, the same on every host.")
    except InputError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            return None  # by an earlier launcher, or by another program, which the connection will report
        raise


def is_here(host: str) -> bool:
    """Returns whether a host name or address is this host's; False if it cannot be resolved."""
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return any(is_named(address, [*LOOPBACK_NAMES, *own_names()]) for address in found)
