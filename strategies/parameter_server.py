"""Trains with workers, which compute gradients, and servers, which hold variables and optimizer state and apply updates."""

import atexit
import contextlib
import dataclasses
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.devices import share_cores
from tfdist.cluster.environment import Cluster
from tfdist.collectives.interface import assign_from_first
from tfdist.config.staleness import REPLAY, ParameterServerOptions, Staleness, count_workers, parse_staleness
from tfdist.coordination import Group, LostMember
from tfdist.coordination.calls import Connection, Handler, Message, Service
from tfdist.coordination.job_token import join_address, listen
from tfdist.distribution.strategy import Result, Strategy, VariableBlocks
from tfdist.errors import PeerLostError
from tfdist.parameter_server.coordinator import Coordinator
from tfdist.parameter_server.remote_variables import RemoteBlocks, RemoteVariables
from tfdist.parameter_server.servers import Servers, WorkerCollectives
from tfdist.parameter_server.variable_server import VariableServer

_log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0  # between checks for lost processes
_CLOSING_SECONDS = 0.3


class ParameterServer(Strategy):
    """A strategy with one replica per worker, whose variables are copies of those on the servers."""

    name = "parameter_server"
    can_train_locally = False
    supports_dynamic_embeddings = True

    def __init__(
        self,
        *,
        cluster: Cluster,
        join: Callable[[Cluster], Group],
        servers: int = ParameterServerOptions.servers,
        staleness: str = ParameterServerOptions.staleness,
        sparse_updates: str = ParameterServerOptions.sparse_updates,
        shard_variables: str = ParameterServerOptions.shard_variables,
        min_table_bytes: int = ParameterServerOptions.min_table_bytes,
        intra_op_threads: int = 0,
    ):
        """Connects workers and servers. On a server, serves until the job ends, and then exits the process.

        Options are those of the flags. Servers are the last processes of `cluster`; with `servers=0`, process 0 is also one.
        """
        workers = count_workers(servers, cluster.size, cluster.servers)
        servers = cluster.size - workers
        rule = parse_staleness(staleness)
        rule.needed_shares(workers)  # raises for an invalid number of workers before other processes wait for this one
        share_cores(cluster, intra_op_threads)
        job_group = join(cluster)
        options = {"sparse_updates": sparse_updates, "shard_variables": shard_variables}
        options |= {"min_table_bytes": str(min_table_bytes)}
        job_group.agree("parameter_server/roles", {"servers": servers, "staleness": str(rule), **options}, "flag --")
        job_group.roles = {rank: f"server {rank - workers}" for rank in range(workers, cluster.size)}
        is_server = cluster.rank >= workers or servers == 0 == cluster.rank
        self._server = _Server(cluster, job_group, workers, max(servers, 1), rule) if is_server else None
        own_address = self._server.address if self._server else ""
        addresses = filter(None, job_group.gather("parameter_server/addresses", own_address))
        connections = [
            Connection(address, _token(job_group, i), f"server {i} (rank {workers + i if servers else 0})")
            for i, address in enumerate(addresses)
        ]
        if self._server:
            self._server.coordinator = connections[0]
        if self._server and cluster.rank >= workers:
            for signal_number in (signal.SIGTERM, signal.SIGINT):  # workers need the servers to save
                signal.signal(signal_number, signal.SIG_IGN)
            self._server.wait(job_group)
            raise SystemExit(0)
        self.cluster = dataclasses.replace(cluster, size=workers, addresses=())
        self.group = job_group.subgroup(range(workers))
        self.replicas, self.local_replicas = workers, range(cluster.rank, cluster.rank + 1)
        self._job_group = job_group
        self._servers = Servers(connections, cluster.rank, workers, shard_variables)
        self.group.describe_wait = self._servers.describe_wait
        self.collectives = WorkerCollectives(self._servers)
        expendable_ranks = range(1, workers) if rule.whole_batches and rule.kind != REPLAY else ()
        self.remote = self.optimizer_shards = RemoteVariables(
            self,
            self._servers,
            rule,
            lambda: job_group.tolerate_lost_members(expendable_ranks),
            sparse_updates=sparse_updates,
            min_table_bytes=min_table_bytes,
        )
        if self.is_chief:
            job_group.on_departure(self._log_departure)
        if not self._server:  # the threads of a server have already ended at exit
            atexit.register(self._servers.leave)

    @property
    def training_shares(self) -> tuple[range, int]:
        return (range(1), 1) if self.remote.whole_batches else super().training_shares

    def _placement(self) -> contextlib.AbstractContextManager:
        return self.remote.creation()

    def gradient_shape(self, variable: keras.Variable) -> tf.TensorShape:
        """See base class. The number of embedding rows that a batch uses differs between batches."""
        return variable.value.shape

    def synchronize(self, variables: Sequence[tf.Variable]) -> None:
        """See base class. Skips tables, which only exist on the servers."""
        assign_from_first([v for v in variables if not self.remote.is_remote(v)], self.collectives)

    @property
    def blocks(self) -> VariableBlocks:
        return RemoteBlocks(self)

    @property
    def ledger_count(self) -> int:
        """See base class. Only the first process writes a ledger, for all workers, because other workers may be lost."""
        return 1

    def with_all_replicas(self, function: Callable[[], Result]) -> Result:
        """See base class. The replicas are the workers that remain when the call begins."""
        replicas = self.replicas, self.local_replicas
        try:
            while True:
                workers, rank = self._servers.workers, self.collectives.rank
                self.replicas, self.local_replicas = len(workers), range(rank, rank + 1)
                result = function()
                if self._servers.workers == workers:
                    return result
        finally:
            self.replicas, self.local_replicas = replicas

    def _log_departure(self, loss: LostMember) -> None:
        remaining = self.cluster.size - len(self.group.departed_members)
        reason = str(loss).rstrip(".")  # the reason may be a complete sentence
        _log.warning("Worker %s. Training continues with %d of %d workers.", reason, remaining, self.cluster.size)

    def close(self) -> None:
        """See base class. Servers exit when all workers have called this method."""
        atexit.unregister(self._servers.leave)
        self._servers.leave()
        if self._server:
            self._server.wait(self._job_group)


class _Server:
    """The services of a server process: its variables and, on the first server, the coordinator.

    Attributes:
      coordinator: connection to the first server.
    """

    coordinator: Connection

    def __init__(self, cluster: Cluster, job_group: Group, workers: int, servers: int, staleness: Staleness):
        self._number, self._servers = max(cluster.rank - workers, 0), servers
        self._present_workers, self._all_have_left = {*range(workers)}, threading.Event()
        self.variables = VariableServer(self._updates, self._sum)
        handlers: dict[str, Handler] = {**self.variables.handlers, "leave": self._leave}
        if self._number == 0:
            coordinator = Coordinator(workers, staleness)
            handlers |= coordinator.handlers
            job_group.on_departure(lambda loss: coordinator.forget(loss.rank))
        job_group.on_departure(lambda loss: self._forget(loss.rank))
        self._handlers = handlers
        host = "127.0.0.1" if cluster.local_size == cluster.size else socket.gethostname()
        listener = listen(join_address(host, 0), "Make this host's name resolvable, for example in /etc/hosts.")
        self._service = Service(handlers, _token(job_group, self._number), listener)
        self.address = join_address(host, self._service.port)

    def wait(self, job_group: Group) -> None:
        """Serves until all workers have left.

        Raises:
          PeerLostError: another process of the job is lost.
        """
        while not self._all_have_left.wait(_POLL_SECONDS):
            if loss := job_group.first_loss():
                raise PeerLostError(f"{loss}.")
        self.variables.close()
        self.coordinator.close()
        time.sleep(_CLOSING_SECONDS)  # the last answers may not have been sent yet
        self._service.close()

    def _leave(self, message: Message) -> Message:
        self._forget(message.values["worker"])
        return Message({})

    def _forget(self, worker: int) -> None:
        self._present_workers.discard(worker)
        if not self._present_workers:
            self._all_have_left.set()

    def _coordinate(self, method: str, values: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> Message:
        if self._number == 0:
            return self._handlers[method](Message(values, arrays))
        return self.coordinator.call(method, values, arrays)

    def _updates(self, version: int, seconds: float) -> Sequence[Any]:
        return self._coordinate("updates", {"version": version, "seconds": seconds}).values["value"]

    def _sum(self, key: str, value: float) -> float:
        values = {"key": key, "member": self._number, "members": self._servers}
        return float(sum(self._coordinate("gather", values, [np.asarray(value)]).arrays))


def _token(job_group: Group, server: int) -> str:
    return job_group.token_for(f"parameter server {server}")


STRATEGY = ParameterServer
