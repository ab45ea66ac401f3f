"""Starts TensorFlow servers, one per process of the job, and exchanges their addresses."""

import contextlib
import dataclasses
import socket
from collections.abc import Iterator

import tensorflow as tf

from tfdist import keras_internals
from tfdist.cluster.environment import Cluster
from tfdist.cluster.signals import preserve_sigterm
from tfdist.coordination import Group
from tfdist.coordination.job_token import free_port
from tfdist.coordination.peer_failure import LOSS_NOTICE_SECONDS
from tfdist.errors import InputError, PeerLostError


@contextlib.contextmanager
def wait_for_servers(group: Group, processes: int, seconds: float) -> Iterator[None]:
    """Context for starting this process's server, which waits for the other servers and cannot be interrupted.

    Raises:
      PeerLostError: not all servers were up in time.
    """
    keras_internals.limit_start_of_workers(processes, seconds)
    try:
        with preserve_sigterm():
            yield
    except tf.errors.DeadlineExceededError as error:
        loss = group.first_loss(LOSS_NOTICE_SECONDS)  # no other thread could run meanwhile
        timeout_text = f"Not every rank's TensorFlow server was up within {seconds:g} s"
        raise PeerLostError(f"{loss or timeout_text}.") from error


def with_addresses(cluster: Cluster, group: Group) -> Cluster:
    """Returns the cluster with the addresses from the environment, or with addresses that the processes choose.

    Raises:
      InputError: the port of this process's address in the environment is in use.
    """
    if cluster.addresses:
        _check_port(cluster.addresses[cluster.rank])
        group.barrier("servers/ports")  # an error must reach the others before they wait, when no other thread can run
        return cluster
    host = "127.0.0.1" if cluster.local_size == cluster.size else socket.gethostname()
    addresses = group.gather("servers/addresses", f"{host}:{free_port()}")
    return dataclasses.replace(cluster, addresses=tuple(addresses))


def _check_port(address: str) -> None:
    with socket.socket() as probe:  # does not listen, because another process could connect
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the engine does
        try:
            probe.bind(("", int(address.rpartition(":")[2])))
        except OSError as error:
            raise InputError(
                f"This process's TensorFlow server needs a free port. Received: {address}, which is in use "
                f"({error.strerror}). End the program that uses it (`ss -ltnp`), or give all processes another TF_CONFIG."
            ) from error
