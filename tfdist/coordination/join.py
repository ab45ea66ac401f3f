"""How a process of a job becomes a member of the job's group."""

import hashlib
import os
from collections.abc import Mapping

from tfdist.cluster.environment import Cluster
from tfdist.coordination.addresses import LOOPBACK, join_address, listen, split_address
from tfdist.coordination.client import RemoteGroup
from tfdist.coordination.group import LAUNCHER, Group
from tfdist.coordination.local import LocalGroup
from tfdist.coordination.server import Server
from tfdist.errors import InputError, TfdistError

ADDRESS_VARIABLE = "TFDIST_GROUP"  # host:port where a launcher serves the group
TOKEN_VARIABLE = "TFDIST_TOKEN"


def join(
    cluster: Cluster,
    *,
    token: str | None = None,
    start_timeout: float = 60.0,
    environment: Mapping[str, str] = os.environ,
) -> Group:
    """Returns the group of the job's processes, once all of them have come.

    Where TFDIST_GROUP is set, a launcher serves the group there; otherwise rank 0 does, at the cluster's coordinator.

    Args:
      cluster: this process among the job's.
      token: what all members must show; by default TFDIST_TOKEN, or else a hash of the cluster's addresses. That hash
        keeps the processes of two jobs apart and is no secret: set TFDIST_TOKEN where others share the network.
      start_timeout: in seconds, from now until all ranks have come.
      environment: where TFDIST_GROUP and TFDIST_TOKEN are looked up.

    Raises:
      PeerLostError: ranks did not come in time, which the message names.
      InputError: rank 0 cannot listen at the coordinator, or the group refused this process.
    """
    if cluster.size == 1:
        return LocalGroup()
    token = token or environment.get(TOKEN_VARIABLE) or _fingerprint(cluster)
    launcher = environment.get(ADDRESS_VARIABLE)
    if launcher:
        group = RemoteGroup(
            launcher, rank=cluster.rank, size=cluster.size, token=token, timeout=start_timeout, server_rank=LAUNCHER
        )
    else:
        group = meet(
            _coordinator(cluster),
            rank=cluster.rank,
            size=cluster.size,
            token=token,
            timeout=start_timeout,
            places=cluster.addresses,
            remedy="Set TFDIST_COORDINATOR=host:port to another one, the same for every process.",
        )
    return started(group, start_timeout)


def meet(
    address: str,
    *,
    rank: int,
    size: int,
    token: str,
    timeout: float,
    remedy: str,
    noun: str = "rank",
    places: tuple[str, ...] = (),
) -> RemoteGroup:
    """Returns a group that its first member serves, in a thread, until it leaves.

    Args:
      address: `host:port` where the first member serves and the others find it.
      rank: this member's number.
      size: how many members there are.
      token: what all must show.
      timeout: in seconds, to reach the server.
      remedy: ends the message when the first member cannot listen there.
      noun: what a member is called in messages.
      places: where each member is expected, for messages.
    """
    if rank != 0:
        return RemoteGroup(address, rank=rank, size=size, token=token, timeout=timeout, noun=noun)
    server = Server(listen(address, remedy), size=size, token=token, noun=noun, places=places)
    try:
        return RemoteGroup(
            _reachable(server.address), rank=0, size=size, token=token, timeout=timeout, noun=noun, on_left=server.close
        )
    except BaseException:
        server.close()
        raise


def started(group: Group, timeout: float) -> Group:
    """Returns the group when all members have come; leaves it if they do not."""
    try:
        group.barrier("start", timeout)
    except TfdistError as error:
        group.leave(error.exit_code, str(error))
        raise
    except BaseException:
        group.leave(1, "interrupted while it waited for the others")
        raise
    return group


def _coordinator(cluster: Cluster) -> str:
    if not cluster.coordinator:
        raise InputError(
            f"The {cluster.size} processes of a job must know where rank 0 is. Received: {cluster.source}'s variables, "
            "which do not say. Set TFDIST_COORDINATOR=host:port, the same for every process."
        )
    if cluster.local_size == cluster.size:  # what nobody else needs to reach, nobody else can
        return join_address(LOOPBACK, split_address(cluster.coordinator)[1])
    return cluster.coordinator


def _reachable(address: str) -> str:
    """The address by which a server's own process reaches it, also where it listens on every interface."""
    host, port = split_address(address)
    return join_address({"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host), port)


def _fingerprint(cluster: Cluster) -> str:
    described = "\n".join((*cluster.addresses, cluster.coordinator, str(cluster.size)))
    return hashlib.sha256(described.encode()).hexdigest()
