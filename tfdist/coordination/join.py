"""Joining of a job's group by its processes."""

import contextlib
import functools
import os
from collections.abc import Mapping

from tfdist.cluster.environment import Cluster
from tfdist.coordination.addresses import LOOPBACK, join_address, listen, split_address
from tfdist.coordination.group import LAUNCHER, Group
from tfdist.coordination.job_token import bound, job_token
from tfdist.coordination.local import LocalGroup
from tfdist.coordination.remote import RemoteGroup
from tfdist.coordination.server import Server
from tfdist.errors import ExitCode, InputError, TfdistError

ADDRESS_VARIABLE = "TFDIST_GROUP"  # host:port at which a launcher serves the group
ELASTIC_VARIABLE = "TFDIST_ELASTIC"  # "1" if the number of processes may change between attempts of a launcher's job
_NOTICE_SECONDS = 2.0  # for the process that has the address already


def join(
    cluster: Cluster,
    *,
    token: str | None = None,
    start_timeout: float = 60.0,
    environment: Mapping[str, str] = os.environ,
) -> Group:
    """Returns the group of the job's processes, after all of them have joined.

    If TFDIST_GROUP is set, a launcher serves the group there; otherwise rank 0 serves it at the cluster's coordinator
    address.

    Args:
      cluster: rank, size and addresses of this job's processes.
      token: secret of all members; by default the job's, see `job_token`.
      start_timeout: seconds from this call until all ranks must have joined.
      environment: where TFDIST_GROUP and the job's token are looked up.

    Raises:
      PeerLostError: ranks did not join in time; the message names them.
      InputError: there is no token for a job over several hosts, rank 0 cannot listen at the coordinator address, or the group
        refused this process.
    """
    if cluster.size == 1:
        return LocalGroup()
    launcher = environment.get(ADDRESS_VARIABLE)
    address = launcher or _coordinator(cluster)
    token = token or job_token(environment, address, _described(cluster), warns=cluster.rank == 0)
    if launcher:
        group = RemoteGroup(
            address, rank=cluster.rank, size=cluster.size, token=token, timeout=start_timeout, server_rank=LAUNCHER
        )
    else:
        group = serve_group(
            address,
            rank=cluster.rank,
            size=cluster.size,
            token=token,
            timeout=start_timeout,
            places=cluster.addresses,
            remedy="Give each process a rank of its own; if another program uses the port, set TFDIST_COORDINATOR=host:port "
            "to another one, the same for every process.",
        )
    return started(group, start_timeout)


def serve_group(
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
      address: `host:port` at which the first member serves the group and the others connect.
      rank: this member's rank.
      size: number of members.
      token: the job's token, of which all members must present what `bound` derives.
      timeout: seconds to wait for the server.
      remedy: last sentence of the error message if the first member cannot listen there.
      noun: what a member is called in messages.
      places: expected location of each member, for messages.
    """
    token = bound(token, noun, address)
    member = functools.partial(RemoteGroup, rank=rank, size=size, token=token, noun=noun)
    if rank != 0:
        return member(address, timeout=timeout)
    try:
        listener = listen(address, remedy)
    except InputError:  # if another first member serves the group, it learns of this one, and tells all
        with contextlib.suppress(TfdistError):
            member(address, timeout=_NOTICE_SECONDS).leave(ExitCode.BAD_INPUT)
        raise
    server = Server(listener, size=size, token=token, noun=noun, places=places)
    try:
        return member(_reachable(server.address), timeout=timeout, on_left=server.close)
    except BaseException:
        server.close()
        raise


def started(group: Group, timeout: float) -> Group:
    """Returns the group when all members have joined; leaves it if they do not."""
    try:
        group.barrier("start", timeout)
    except TfdistError as error:
        group.leave(error.exit_code, str(error))
        raise
    except BaseException:
        group.leave(1, "interrupted while waiting for the others")
        raise
    return group


def _coordinator(cluster: Cluster) -> str:
    if not cluster.coordinator:
        raise InputError(
            f"The {cluster.size} processes of a job must know the address of rank 0. Received: {cluster.source}'s "
            "variables, which do not have it. Set TFDIST_COORDINATOR=host:port, the same for every process."
        )
    if cluster.local_size == cluster.size:  # all processes are on this host, so no other host needs access
        return join_address(LOOPBACK, split_address(cluster.coordinator)[1])
    return cluster.coordinator


def _reachable(address: str) -> str:
    """Returns the address at which the server's own process reaches it, even if it listens on every interface."""
    host, port = split_address(address)
    return join_address({"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host), port)


def _described(cluster: Cluster) -> str:
    return "\n".join((*cluster.addresses, cluster.coordinator, str(cluster.size)))
