"""Starting Horovod, also without horovodrun: rank 0 then serves Horovod's own rendezvous, the group tells where."""

import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from tfdist.cluster.environment import Cluster
from tfdist.coordination import Group
from tfdist.coordination.addresses import (
    LOOPBACK,
    Way,
    is_loopback,
    join_address,
    network_interface,
    split_address,
    way_to,
)
from tfdist.coordination.join import ADDRESS_VARIABLE
from tfdist.errors import InputError

CHECK, SHUTDOWN = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
STALL_SECONDS = 600
SETTINGS = {
    # Fusion by time of arrival changes the order of summation from run to run; our buckets are fixed.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # Milliseconds between looks at the queue: the default of 1 adds its half to every message, 0.1 busies a third of a core.
    "HOROVOD_CYCLE_TIME": "0.5",
}


def start_horovod(
    cluster: Cluster, join: Callable[[Cluster], Group], *, stall_seconds: int = STALL_SECONDS, **options: Any
) -> Group:
    """Initialises Horovod in this process, with our settings where the environment has none of its own.

    Args:
      cluster: this process among the job's.
      join: joins the job's group; called once, when its address is known.
      stall_seconds: after which Horovod itself ends a call that a rank leaves out.
      **options: arguments of Horovod's `init`.

    Returns:
      The job's group.
    """
    _set_defaults(stall_seconds)
    is_placed = "HOROVOD_RANK" in os.environ or cluster.source == "MPI"
    if is_placed and not (cluster.coordinator or ADDRESS_VARIABLE in os.environ):
        _init(options)
        return join(_with_coordinator(cluster))
    group = join(cluster)  # first: it waits for slow ranks as long as it is told, and Gloo for 30 s, and then aborts
    if is_placed:
        _init(options)
    else:
        start_through(group, cluster, **options)
    return group


def start_elastic(**options: Any) -> None:
    """Initialises Horovod in a process of an elastic job of horovodrun's, for the first time or after a reset.

    Nothing else is said between the ranks: a process that was there before and one that is new must make the same calls,
    whatever the number of ranks was when each of them began.

    Args:
      **options: arguments of Horovod's `init`.
    """
    _set_defaults(STALL_SECONDS)
    _init(options)


def start_through(group: Group, cluster: Cluster, **options: Any) -> None:
    """Initialises Horovod, for the first time or again: the group tells where rank 0 serves a new rendezvous.

    One that has served an initialisation has addresses of it, with which the next one would crash.
    """
    os.environ.update(serve_and_describe(cluster, group))
    _init(options)


def _init(options: dict[str, Any]) -> None:
    """Initialises Horovod; where it refuses its arguments after it has started, it is ended, so that it can start again."""
    try:
        hvd.init(**options)
    except BaseException:
        hvd.shutdown()
        raise


def _set_defaults(stall_seconds: int) -> None:
    for name, value in {**SETTINGS, **stall_settings(os.environ, stall_seconds)}.items():
        os.environ.setdefault(name, value)


def stall_settings(environment: Mapping[str, str], longest: int = STALL_SECONDS) -> dict[str, str]:
    """After how many seconds a call that a rank leaves out is warned of, and ends Horovod; by default 60 and `longest`.

    Horovod asks for the second to be the larger one; where the user says one of them, the other keeps to that.
    """
    latest = int(environment.get(SHUTDOWN) or 0) or longest  # 0 is Horovod's word for never
    check = int(environment.get(CHECK) or max(1, min(60, latest // 2)))
    return {CHECK: str(check), SHUTDOWN: environment.get(SHUTDOWN) or str(max(longest, 2 * check))}


def _with_coordinator(cluster: Cluster) -> Cluster:
    """Rank 0 chooses a port for the group; Horovod, which is up, carries the address."""
    if cluster.size == 1:
        return cluster
    host = LOOPBACK if cluster.local_size == cluster.size else socket.gethostname()
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"{host}:{probe.getsockname()[1]}"
    return dataclasses.replace(cluster, coordinator=hvd.broadcast_object(address, 0, name="group_address"))


def serve_and_describe(cluster: Cluster, group: Group) -> dict[str, str]:
    """Starts the rendezvous on rank 0 and returns the environment with which this process's `hvd.init` finds it.

    Ranks are numbered by host, as Horovod does it; the ranks of a host must be consecutive.
    """
    hosts = [LOOPBACK] * cluster.size if cluster.local_size == cluster.size else _hosts(cluster, group)
    slots = _slots(hosts)
    port = None
    if cluster.rank == 0:
        port = _serve(LOOPBACK if hosts[0] == LOOPBACK else "", slots)
    port = group.broadcast("horovod/port", port)
    mine = slots[cluster.rank]
    environment = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": mine.hostname,
        "HOROVOD_RANK": str(mine.rank),
        "HOROVOD_SIZE": str(mine.size),
        "HOROVOD_LOCAL_RANK": str(mine.local_rank),
        "HOROVOD_LOCAL_SIZE": str(mine.local_size),
        "HOROVOD_CROSS_RANK": str(mine.cross_rank),
        "HOROVOD_CROSS_SIZE": str(mine.cross_size),
    }
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or network_interface(hosts[cluster.rank])
    return environment | ({"HOROVOD_GLOO_IFACE": interface} if interface else {})  # else Gloo chooses


def _hosts(cluster: Cluster, group: Group) -> list[str]:
    """By rank, the address at which the others reach its host.

    Names would not do: those of containers repeat, and a host's own name often stands for its loopback. Whoever reaches rank 0
    over the loopback is on its host, whose address the others know.
    """
    served = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or socket.gethostname()  # where a launcher knows rank 0
    at = group.broadcast("horovod/at", cluster.coordinator or join_address(served, 1))
    ways = group.gather("horovod/ways", list(_way_to(at)))
    first = next((other for own, other in ways if not is_loopback(own)), LOOPBACK)
    return [first if is_loopback(own) else own for own, _ in ways]


def _way_to(address: str) -> Way:
    host, port = split_address(address)
    try:
        return way_to(host, port, socket.AF_INET)
    except OSError as error:
        raise InputError(
            f"Horovod's rendezvous needs an IPv4 address of rank 0's host. Received: {address} ({error}). Set "
            "TFDIST_COORDINATOR=host:port to one, the same for every process."
        ) from error


def _serve(interface: str, slots: list) -> int:
    server = RendezvousHTTPServer((interface, 0), RendezvousHandler, 0)
    server.init(slots)
    threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True).start()
    return server.server_address[1]


def _slots(hosts: list[str]) -> list:
    names = list(dict.fromkeys(hosts))
    infos = [HostInfo(name, hosts.count(name)) for name in names]
    return get_host_assignments(infos, len(hosts), len(hosts))
