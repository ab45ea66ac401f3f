"""Defines the environment variables and servers with which the processes of each engine find each other."""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from tfdist.cluster.tf_config import EVALUATOR
from tfdist.coordination import horovod_store
from tfdist.errors import InputError
from tfdist.launcher.placement import Placement


class Engine(NamedTuple):
    """The server and environment variables with which the processes of an engine find each other.

    Attributes:
      serve: runs the engine's server on node 0; takes the placement and yields the port.
      variables: takes the placement, that port and a rank; returns the environment variables of the rank.
      port_warning: warning about open ports of the ranks, as a sentence without a period; may be empty.
    """

    serve: Callable[[Placement], AbstractContextManager[int]]
    variables: Callable[[Placement, int, int], dict[str, str]]
    port_warning: str


def _tf_config(placement: Placement, port: int, rank: int) -> dict[str, str]:
    workers = placement.size - placement.servers
    task = {"type": "worker", "index": rank} if rank < workers else {"type": "ps", "index": rank - workers}
    return {"TF_CONFIG": json.dumps({"cluster": _cluster(placement), "task": task})}


def _cluster(placement: Placement) -> dict[str, tuple[str, ...]]:
    workers = placement.size - placement.servers
    addresses = {"worker": placement.addresses[:workers], "ps": placement.addresses[workers:]}
    return {job: values for job, values in addresses.items() if values}


def evaluator_variables(placement: Placement) -> dict[str, str]:
    """Returns the environment variables of the evaluator, for every engine; it uses no GPU, because the ranks do."""
    task = {"type": EVALUATOR, "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": _cluster(placement), "task": task}), "CUDA_VISIBLE_DEVICES": "-1"}


@contextlib.contextmanager
def _serve_rendezvous(placement: Placement) -> Iterator[int]:
    """Runs Horovod's rendezvous server; like Horovod itself, it has no authentication and needs a trusted network."""
    try:
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    except ImportError as error:
        raise InputError(
            f"--launcher=horovod needs Horovod. Received: {error}. Run `tfdist install_horovod`."
        ) from error
    hosts = [HostInfo(_node_name(node), len(ports)) for node, ports in enumerate(placement.ports)]
    slots = get_host_assignments(hosts, placement.size, placement.size)
    with horovod_store.running_server(placement.hosts[0], slots) as port:
        yield port


def _horovod_variables(placement: Placement, port: int, rank: int) -> dict[str, str]:
    counts, local_rank = [len(ports) for ports in placement.ports], rank - placement.ranks().start
    hosts_with_rank = [count > local_rank for count in counts]
    values = {
        "RANK": rank,
        "SIZE": placement.size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": counts[placement.node],
        "CROSS_RANK": sum(hosts_with_rank[: placement.node]),
        "CROSS_SIZE": sum(hosts_with_rank),
    }
    variables = {f"HOROVOD_{name}": str(value) for name, value in values.items()}
    variables |= horovod_store.gloo_variables(placement.hosts[0], port, lambda: placement.interface)
    return variables | {"HOROVOD_HOSTNAME": _node_name(placement.node)}


def _node_name(node: int) -> str:
    """Returns a name for Horovod; containers may have equal host names."""
    return f"node-{node}"


ENGINES = {
    "tensorflow": Engine(
        lambda placement: contextlib.nullcontext(0),  # no server
        _tf_config,
        "TensorFlow's servers accept anyone who can reach their ports, on every network interface "
        "(docs/guides/security.md)",
    ),
    "horovod": Engine(_serve_rendezvous, _horovod_variables, ""),
}
