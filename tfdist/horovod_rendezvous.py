"""Starting Horovod (Gloo) without horovodrun: rank 0 serves Horovod's own rendezvous, the group tells where."""

import socket
import threading

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from tfdist.cluster import Cluster
from tfdist.group import Group


def serve_and_describe(cluster: Cluster, group: Group) -> dict[str, str]:
    """Starts the rendezvous on rank 0 and returns the environment with which this process's `hvd.init` finds it.

    Ranks are numbered by host, as Horovod does it; the ranks of a host must be consecutive.
    """
    one_host = cluster.local_size == cluster.size
    host = "127.0.0.1" if one_host else socket.gethostname()
    slots = _slots(group.gather("horovod/hosts", host))
    port = None
    if cluster.rank == 0:
        port = _serve("127.0.0.1" if one_host else "", slots)
    port = group.broadcast("horovod/port", port)
    first = group.broadcast("horovod/host", host)
    mine = slots[cluster.rank]
    environment = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": first,
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
    return environment | ({"HOROVOD_GLOO_IFACE": "lo"} if one_host else {})


def _serve(interface: str, slots: list) -> int:
    server = RendezvousHTTPServer((interface, 0), RendezvousHandler, 0)
    server.init(slots)
    threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True).start()
    return server.server_address[1]


def _slots(hosts: list[str]) -> list:
    names = list(dict.fromkeys(hosts))
    infos = [HostInfo(name, hosts.count(name)) for name in names]
    return get_host_assignments(infos, len(hosts), len(hosts))
