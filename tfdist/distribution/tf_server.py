"""TensorFlow servers, one per process of the job: their addresses and their start."""

import contextlib
import dataclasses
import socket
from collections.abc import Iterator

import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster.environment import Cluster
from tfdist.coordination import Group
from tfdist.coordination.addresses import free_port
from tfdist.coordination.peer_failure import LOSS_NOTICE_SECONDS
from tfdist.errors import InputError, PeerLostError
from tfdist.process.signals import sigterm_preserved


@contextlib.contextmanager
def starting(group: Group, processes: int, seconds: float) -> Iterator[None]:
    """Context in which this process's server is started, which waits uninterruptibly for the other servers.

    Args:
      group: group of the job's processes.
      processes: number of processes.
      seconds: how long to wait.

    Raises:
      PeerLostError: not all servers were up in time.
    """
    keras_internals.limit_start_of_workers(processes, seconds)
    try:
        with sigterm_preserved():
            yield
    except tf.errors.DeadlineExceededError as error:
        loss = group.lost(LOSS_NOTICE_SECONDS)  # no other thread could run meanwhile
        late = f"Not every rank's TensorFlow server was up within {seconds:g} s"
        raise PeerLostError(f"{loss or late}.") from error


def with_addresses(cluster: Cluster, group: Group) -> Cluster:
    """Returns the cluster; if the environment has no addresses, with those that the processes choose and exchange."""
    if cluster.addresses:
        group.barrier("servers/ports")  # none of `port_held` is listened at any more, to which an engine could connect
        return cluster
    host = "127.0.0.1" if cluster.local_size == cluster.size else socket.gethostname()
    addresses = group.gather("servers/addresses", f"{host}:{free_port()}")
    return dataclasses.replace(cluster, addresses=tuple(addresses))


@contextlib.contextmanager
def port_held(cluster: Cluster) -> Iterator[None]:
    """Context in which this process joins its group: holds its port in TF_CONFIG, if any, which no other may use.

    A second process with the same task is refused, for which the others would wait until their deadline.

    Raises:
      InputError: the port is in use.
    """
    if not cluster.addresses:
        yield
        return
    address = cluster.addresses[cluster.rank]
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the engine does
        try:
            holder.bind(("", int(address.rpartition(":")[2])))
            holder.listen()
        except OSError as error:
            raise InputError(
                f"This process's TensorFlow server needs a free port. Received: {address}, which is in use "
                f"({error.strerror}). Give each process a task of its own in TF_CONFIG; if another program uses the port "
                "(`ss -ltnp`), end it, or choose another port on every process."
            ) from error
        yield
