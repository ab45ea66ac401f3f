"""Initializes Horovod. Without horovodrun, rank 0 serves Horovod's rendezvous and the group distributes its address."""

import dataclasses
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

from tfdist.cluster.environment import Cluster
from tfdist.coordination import Group, horovod_store
from tfdist.coordination.addresses import (
    LOOPBACK,
    Route,
    free_port,
    is_loopback,
    join_address,
    network_interface,
    route_to,
    split_address,
)
from tfdist.coordination.join import ADDRESS_VARIABLE
from tfdist.errors import InputError

CHECK, SHUTDOWN = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
STALL_SECONDS = 600
_LONGEST_ADDRESS = 512  # bytes of a host name and port, with room to spare
SETTINGS = {
    # Horovod fuses tensors by arrival, which changes the order of summation between runs; our buckets are fixed.
    "HOROVOD_FUSION_THRESHOLD": "0",
    # Polling interval in ms: half of the default of 1 is added to every message; 0.1 keeps a third of a core busy.
    "HOROVOD_CYCLE_TIME": "0.5",
}


def start_horovod(
    cluster: Cluster, join: Callable[[Cluster], Group], *, stall_seconds: int = STALL_SECONDS, **options: Any
) -> Group:
    """Initializes Horovod in this process, with tfdist's settings unless the environment overrides them.

    Args:
      cluster: this process in the job.
      join: joins the job's group; called once, when the group's address is known.
      stall_seconds: seconds after which Horovod aborts an operation that a rank does not submit.
      **options: arguments of Horovod's `init`.

    Returns:
      The job's group.
    """
    _set_defaults(stall_seconds)
    is_placed = "HOROVOD_RANK" in os.environ or cluster.source == "MPI"
    if is_placed and not (cluster.coordinator or ADDRESS_VARIABLE in os.environ):
        _init(options)
        return join(_with_coordinator(cluster))
    # Joining comes first: it waits for slow ranks as long as configured, whereas Gloo aborts after 30 s.
    group = join(cluster)
    if is_placed:
        _init(options)
    else:
        start_through(group, cluster, **options)
    return group


def start_elastic(**options: Any) -> None:
    """Initializes Horovod in a process of an elastic horovodrun job, for the first time or after a reset.

    There is no other communication between the ranks here: surviving and new processes must make the same calls,
    whatever the number of ranks was when each of them started.

    Args:
      **options: arguments of Horovod's `init`.
    """
    _set_defaults(STALL_SECONDS)
    _init(options)


def start_through(group: Group, cluster: Cluster, **options: Any) -> None:
    """Initializes Horovod, for the first time or again, through a new rendezvous on rank 0.

    The group distributes its address. A rendezvous is used only once: it still has the addresses of its initialization,
    with which the next one would crash.
    """
    os.environ.update(serve_and_describe(cluster, group))
    _init(options)


def _init(options: dict[str, Any]) -> None:
    """Initializes Horovod; if it rejects its arguments after it has started, shuts it down, to allow another start."""
    try:
        hvd.init(**options)
    except BaseException:
        hvd.shutdown()
        raise


def _set_defaults(stall_seconds: int) -> None:
    for name, value in {**SETTINGS, **stall_settings(os.environ, stall_seconds)}.items():
        os.environ.setdefault(name, value)


def stall_settings(environment: Mapping[str, str], longest: int = STALL_SECONDS) -> dict[str, str]:
    """Returns Horovod's settings for stalled operations: the seconds to a warning and to a shutdown.

    The defaults are 60 and `longest`. Horovod requires the second to be larger; if the user sets only one of them, the
    other is adapted to it.
    """
    latest = int(environment.get(SHUTDOWN) or 0) or longest  # 0 means never in Horovod
    check = int(environment.get(CHECK) or max(1, min(60, latest // 2)))
    return {CHECK: str(check), SHUTDOWN: environment.get(SHUTDOWN) or str(max(longest, 2 * check))}


def _with_coordinator(cluster: Cluster) -> Cluster:
    """Lets rank 0 choose a port for the group and broadcasts the address through Horovod, which is already running."""
    if cluster.size == 1:
        return cluster
    host = LOOPBACK if cluster.local_size == cluster.size else socket.gethostname()
    address = np.frombuffer(join_address(host, free_port()).encode().ljust(_LONGEST_ADDRESS, b"\0"), np.uint8)
    sent = hvd.broadcast(tf.constant(address), 0, name="group_address").numpy().tobytes()
    return dataclasses.replace(cluster, coordinator=sent.rstrip(b"\0").decode())


def serve_and_describe(cluster: Cluster, group: Group) -> dict[str, str]:
    """Starts the rendezvous on rank 0 and returns the environment with which this process's `hvd.init` finds it.

    As in Horovod, ranks are numbered by host: the ranks of a host must be consecutive.
    """
    hosts = [LOOPBACK] * cluster.size if cluster.local_size == cluster.size else _hosts(cluster, group)
    slots = _slots(hosts)
    port = None
    if cluster.rank == 0:
        port = horovod_store.serve(hosts[0], slots).server_port
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
    return environment | ({"HOROVOD_GLOO_IFACE": interface} if interface else {})  # otherwise Gloo chooses


def _hosts(cluster: Cluster, group: Group) -> list[str]:
    """Returns for each rank the address at which other ranks reach its host.

    Host names do not work: those of containers are not unique, and a host's own name often resolves to its loopback
    address. A rank that reaches rank 0 over the loopback is on rank 0's host, whose address the other hosts know.
    """
    # The launcher knows rank 0 by this address.
    served = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or socket.gethostname()
    at = group.broadcast("horovod/at", cluster.coordinator or join_address(served, 1))
    ways = group.gather("horovod/ways", list(_way_to(at)))
    first = next((other for own, other in ways if not is_loopback(own)), LOOPBACK)
    return [first if is_loopback(own) else own for own, _ in ways]


def _way_to(address: str) -> Route:
    host, port = split_address(address)
    try:
        return route_to(host, port, socket.AF_INET)
    except OSError as error:
        raise InputError(
            f"Horovod's rendezvous needs an IPv4 address of rank 0's host. Received: {address} ({error}). Set "
            "TFDIST_COORDINATOR=host:port to one, the same for every process."
        ) from error


def _slots(hosts: list[str]) -> list:
    names = list(dict.fromkeys(hosts))
    infos = [HostInfo(name, hosts.count(name)) for name in names]
    return get_host_assignments(infos, len(hosts), len(hosts))
