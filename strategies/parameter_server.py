"""Workers compute gradients; servers hold the variables and the optimizer's state, and apply updates."""

import atexit
import contextlib
import dataclasses
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.devices import share_cores
from tfdist.cluster.environment import Cluster
from tfdist.collectives.interface import broadcast_from_first
from tfdist.config.staleness import (
    BY_SIZE,
    EXACT,
    MIN_TABLE_BYTES,
    REPLAY,
    SYNC,
    Staleness,
    count_workers,
    parse_staleness,
)
from tfdist.coordination import Group, LostMember
from tfdist.coordination.job_token import join_address
from tfdist.distribution.strategy import JobVariables, Result, Strategy, VariableBlocks
from tfdist.errors import PeerLostError
from tfdist.parameter_server.coordinator import Coordinator
from tfdist.parameter_server.messages import Connection, Service
from tfdist.parameter_server.remote_variables import RemoteBlocks, RemoteVariables
from tfdist.parameter_server.servers import Servers, WorkerCollectives
from tfdist.parameter_server.variable_server import VariableServer

_log = logging.getLogger(__name__)

_SECONDS = 1.0  # between checks for lost processes
_CLOSING_SECONDS = 0.3


class ParameterServer(Strategy):
    """A strategy with one replica per worker, whose variables are copies of those on the servers."""

    name = "parameter_server"
    can_train_locally = False
    trains_keyed_rows = True

    def __init__(
        self,
        *,
        cluster: Cluster,
        join: Callable[[Cluster], Group],
        servers: int = -1,
        staleness: str = SYNC,
        sparse_updates: str = EXACT,
        shard_variables: str = BY_SIZE,
        min_table_bytes: int = MIN_TABLE_BYTES,
        intra_op_threads: int = 0,
    ):
        """Connects workers and servers. On a server, serves until the job ends, and then exits the process.

        Args:
          cluster: this process in the job, including the servers.
          join: joins the job's group.
          servers: number of servers, the last processes of the job; 0 if process 0 is also the server; -1 for the number in
            TF_CONFIG, or 1.
          staleness: when gradients are applied, as in `--staleness`.
          sparse_updates: how embeddings that are split by rows are updated: "exact" or "lazy", as in `--sparse_updates`.
          shard_variables: which server has which variable, as in `--shard_variables`.
          min_table_bytes: minimum size of an embedding that is split by rows.
          intra_op_threads: threads per operation; 0 for a share of the cores, to which the process is also pinned.
        """
        workers = count_workers(servers, cluster.size, cluster.servers)
        servers = cluster.size - workers
        rule = parse_staleness(staleness)
        needed_shares = rule.needed_shares(workers)
        share_cores(cluster, intra_op_threads)
        job = join(cluster)
        options = {"sparse_updates": sparse_updates, "shard_variables": shard_variables}
        options |= {"min_table_bytes": str(min_table_bytes)}
        job.agree("parameter_server/roles", {"servers": servers, "staleness": str(rule), **options}, "flag --")
        job.roles = {rank: f"server {rank - workers}" for rank in range(workers, cluster.size)}
        is_server = cluster.rank >= workers or servers == 0 == cluster.rank
        self._server = _Server(cluster, job, workers, max(servers, 1), rule, needed_shares) if is_server else None
        connections = _connections(cluster, job, workers, servers, self._server)
        if self._server and cluster.rank >= workers:
            for signal_number in (signal.SIGTERM, signal.SIGINT):  # workers need the servers to save
                signal.signal(signal_number, signal.SIG_IGN)
            self._server.wait(job)
            raise SystemExit(0)
        self.cluster = dataclasses.replace(cluster, size=workers, addresses=())
        self.group = job.subgroup(range(workers))
        self.replicas, self.local_replicas = workers, range(cluster.rank, cluster.rank + 1)
        self._job = job
        self._servers = Servers(connections, cluster.rank, workers, shard_variables)
        self.group.describe_wait = self._servers.describe_wait
        self.collectives = WorkerCollectives(self._servers, cluster.rank)
        expendable_ranks = range(1, workers) if rule.whole_batches and rule.kind != REPLAY else ()
        self.remote = self.optimizer_shards = RemoteVariables(
            self,
            self._servers,
            rule,
            lambda: job.tolerate_losses(expendable_ranks),
            sparse_updates=sparse_updates,
            min_table_bytes=min_table_bytes,
        )
        if self.is_chief:
            job.on_departure(self._log_departure)
        if not self._server:  # the threads of a server have already ended at exit
            atexit.register(self._servers.leave)

    @property
    def training_shares(self) -> tuple[range, int]:
        """See base class."""
        return (range(1), 1) if self.remote.whole_batches else super().training_shares

    def _placement(self) -> contextlib.AbstractContextManager:
        """See base class."""
        return self.remote.creation()

    def gradient_shape(self, variable: keras.Variable) -> tf.TensorShape:
        """See base class. The number of rows of a table that are used differs between batches."""
        return variable.value.shape

    def synchronize(self, variables: Sequence[tf.Variable]) -> None:
        """See base class. Skips tables, which only exist on the servers."""
        variables = [variable for variable in variables if not self.remote.is_remote(variable)]
        values = broadcast_from_first([tf.convert_to_tensor(variable) for variable in variables], self.collectives)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    @property
    def blocks(self) -> VariableBlocks:
        """See base class."""
        return _ChiefBlocks(self) if self.remote.whole_batches else RemoteBlocks(self)

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
        """See base class. Servers exit when all workers have called it."""
        atexit.unregister(self._servers.leave)
        self._servers.leave()
        if self._server:
            self._server.wait(self._job)


class _ChiefBlocks(RemoteBlocks):
    """Saves the values of all replicas on the first worker, because others may be lost.

    All have the servers' values, except of states that the first worker collects. Those of a lost worker are zeros.
    """

    def job_variables(self, forms: Mapping[str, Any]) -> JobVariables:
        """See base class."""
        assert self._strategy.remote
        self._strategy.remote.collect_states()
        return super().job_variables(forms)

    def saved_blocks(
        self, variable: tf.Variable, per_replica: bool, copied: bool = True
    ) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """See base class."""
        blocks, replicas = super().saved_blocks(variable, False, copied), range(self._strategy.replicas)
        if not per_replica:
            return blocks
        states = self._strategy.remote.collected_states.get(id(variable)) if self._strategy.remote else None
        return [
            ((replica, *offset), (values if states is None else states.get(replica, np.zeros_like(values)))[np.newaxis])
            for replica in replicas
            for offset, values in blocks
        ]


class _Server:
    """The services of a server process: its variables and, on the first server, the coordinator."""

    def __init__(
        self, cluster: Cluster, job: Group, workers: int, servers: int, staleness: Staleness, needed_shares: int
    ):
        number = max(cluster.rank - workers, 0)
        self._number, self._workers, self._servers = number, workers, servers
        self._coordinator = (
            Coordinator(
                workers,
                synchronous=not staleness.whole_batches,
                bound=staleness.bound,
                needed_shares=needed_shares,
                late=staleness.late,
                pull_every=staleness.pull_every,
            )
            if number == 0
            else None
        )
        self._connection: Connection | None = None
        self.variables = VariableServer(self._updates, self._sum)
        if coordinator := self._coordinator:
            job.on_departure(lambda loss: coordinator.forget(loss.rank))
        handlers = {**self.variables.handlers, **(self._coordinator.handlers if self._coordinator else {})}
        self.host = "127.0.0.1" if cluster.local_size == cluster.size else socket.gethostname()
        self._service = Service(handlers, _token(job, number), self.host, clients=cluster.size)
        self.address = join_address(self.host, self._service.port)

    def connect(self, coordinator: Connection) -> None:
        """Sets the connection to the coordinator."""
        self._connection = coordinator

    def wait(self, job: Group) -> None:
        """Serves until all workers have left.

        Raises:
          PeerLostError: another process of the job is lost.
        """
        while not self._have_left():
            if loss := job.first_loss():
                raise PeerLostError(f"{loss}.")
        self.variables.close()
        if not self._coordinator:
            assert self._connection
            self._connection.call("leave", {"member": self._workers + self._number - 1})
        if self._connection:
            self._connection.close()
        time.sleep(_CLOSING_SECONDS)  # the last answers may not have been sent yet
        self._service.close()

    def _have_left(self) -> bool:
        if self._coordinator:
            return self._coordinator.have_left(self._workers + self._servers - 1, _SECONDS)
        assert self._connection
        return self._connection.call("have_left", {"members": self._workers, "seconds": _SECONDS}).values["value"]

    def _updates(self, version: int, seconds: float) -> Sequence[Any]:
        if self._coordinator:
            return self._coordinator.updates(version, seconds)
        assert self._connection
        return self._connection.call("updates", {"version": version, "seconds": seconds}).values["value"]

    def _sum(self, key: str, value: float) -> float:
        assert self._connection
        values = {"key": key, "member": self._number, "members": self._servers}
        arrays = self._connection.call("gather", values, [tf.constant(value, tf.float64).numpy()]).arrays
        return float(sum(arrays))


def _token(job: Group, server: int) -> str:
    return job.token_for(f"parameter server {server}")


def _connections(cluster: Cluster, job: Group, workers: int, servers: int, server: _Server | None) -> list[Connection]:
    """Returns this process's connections to all servers."""
    addresses = [a for a in job.gather("parameter_server/addresses", server.address if server else "") if a]
    ranks = range(workers, cluster.size) if servers else [0]
    connections = [
        Connection(address, _token(job, number), f"server {number} (rank {rank})")
        for number, (address, rank) in enumerate(zip(addresses, ranks, strict=True))
    ]
    if server:
        server.connect(connections[0])
    return connections


STRATEGY = ParameterServer
