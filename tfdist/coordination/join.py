"""Joins the group of a job, or creates the group of a single process."""

import contextlib
import functools
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence

from tfdist.cluster.environment import Cluster
from tfdist.coordination.client import Publications, RemoteGroup
from tfdist.coordination.group import LAUNCHER, Group, Json, Listener, LostMember, subgroup_members
from tfdist.coordination.job_token import LOOPBACK, group_token, job_token, join_address, listen, split_address
from tfdist.coordination.messages import derive_token
from tfdist.coordination.server import Server
from tfdist.errors import ExitCode, InputError, TfdistError


class LocalGroup(Group):
    """The group of a single process."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._publications = Publications("group-publications")
        self._secret = secrets.token_hex(16)

    def gather(self, name: str, value: Json, deadline: float = 60.0) -> list[Json]:
        return [_json_round_trip(value)]

    def publish(self, topic: str, value: Json) -> None:
        self._publications.put(topic, _json_round_trip(value))

    def subscribe(self, topic: str, callback: Listener) -> None:
        self._publications.subscribe(topic, callback)

    def on_loss(self, callback: Callable[[LostMember], None]) -> None:
        """Does nothing, because there are no other members."""

    def token_for(self, purpose: str) -> str:
        return derive_token(self._secret, purpose)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        subgroup_members(self, ranks)
        return self

    def leave(self, code: int = 0, reason: str = "") -> None:
        self._publications.close()


def _json_round_trip(value: Json) -> Json:
    return json.loads(json.dumps(value))  # fails for values that could not be sent between processes


ADDRESS_VARIABLE = "TFDIST_GROUP"  # host:port at which a launcher serves the group
ELASTIC_VARIABLE = "TFDIST_ELASTIC"  # "1" if the number of processes may change between attempts of a launcher's job
_REPORT_SECONDS = 2.0  # in which to report this process to a server that already listens at the address


def join(cluster: Cluster, *, start_timeout: float = 60.0, environment: Mapping[str, str] = os.environ) -> Group:
    """Returns the group of the job's processes after all of them have joined.

    If TFDIST_GROUP is set, a launcher serves the group there. Otherwise, rank 0 serves it at the coordinator's address.

    Args:
      cluster: rank, size and addresses of this job's processes.
      start_timeout: seconds until all ranks must have joined.
      environment: environment variables, such as TFDIST_GROUP.

    Raises:
      PeerLostError: ranks did not join in time; the message names them.
      InputError: there is no token for a job on several hosts, rank 0 cannot listen at the coordinator address, or the group
        refused this process.
    """
    if cluster.size == 1:
        return LocalGroup()
    launcher_address = environment.get(ADDRESS_VARIABLE)
    address = launcher_address or _coordinator(cluster)
    description = "\n".join((*cluster.addresses, cluster.coordinator, str(cluster.size)))
    token = job_token(environment, address, description, warns=cluster.rank == 0)
    if launcher_address:
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
            addresses=cluster.addresses,
            remedy="Set a unique rank for each process. If another program uses the port, set TFDIST_COORDINATOR=host:port "
            "to another one, the same for every process.",
        )
    return wait_for_members(group, start_timeout)


def serve_group(  # noqa: D417 - see `RemoteGroup` for the other arguments
    address: str,
    *,
    rank: int,
    size: int,
    token: str,
    timeout: float,
    remedy: str,
    noun: str = "rank",
    addresses: tuple[str, ...] = (),
) -> RemoteGroup:
    """Returns a group that is served by a thread of its first member until this member leaves.

    Args:
      address: `host:port` at which the first member serves the group and the others connect.
      token: the job's token, from which the group's token is derived.
      remedy: last sentence of the error message if the first member cannot listen there.
      addresses: see `Server`.
    """
    token = group_token(token, noun, address)
    create_member = functools.partial(RemoteGroup, rank=rank, size=size, token=token, noun=noun)
    if rank != 0:
        return create_member(address, timeout=timeout)
    try:
        listener = listen(address, remedy)
    except InputError:  # if another process with rank 0 serves the group, it notifies all members of the conflict
        with contextlib.suppress(TfdistError):
            create_member(address, timeout=_REPORT_SECONDS).leave(ExitCode.BAD_INPUT)
        raise
    server = Server(listener, size=size, token=token, noun=noun, addresses=addresses)
    host, port = split_address(server.address)  # the server may listen on all interfaces
    local_address = join_address({"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host), port)
    try:
        return create_member(local_address, timeout=timeout, on_left=server.close)
    except BaseException:
        server.close()
        raise


def wait_for_members(group: Group, timeout: float) -> Group:
    """Returns the group after all members have joined; leaves it if they do not join in time."""
    try:
        group.barrier("start", timeout)
    except TfdistError as error:
        group.leave(error.exit_code, str(error))
        raise
    except BaseException:
        group.leave(1, "interrupted while waiting for the other members")
        raise
    return group


def _coordinator(cluster: Cluster) -> str:
    if not cluster.coordinator:
        raise InputError(
            f"The {cluster.size} processes of a job must know the address of rank 0. Received: {cluster.source}'s "
            "variables, which do not contain it. Set TFDIST_COORDINATOR=host:port, the same for every process."
        )
    if cluster.local_size == cluster.size:  # all processes are on this host, so no other host needs access
        return join_address(LOOPBACK, split_address(cluster.coordinator)[1])
    return cluster.coordinator
