"""The control plane: communication between the processes of a job, outside every graph.

It keeps working when collectives hang. It transports small JSON values, never tensors, between processes that know the job's
token. Its server detects lost members by closed connections or missing heartbeats; `peer_failure` then ends the others. Sync
points let all ranks act at the same step; the watchdog reports calls that hang; and the rendezvous of Horovod and MPI uses the
group. `calls` connects pairs of processes: launchers of an elastic job, and workers and parameter servers, with arrays, too.
Nothing here imports TensorFlow.
"""

from tfdist.coordination.client import RemoteGroup
from tfdist.coordination.group import Group, Json, LostMember
from tfdist.coordination.join import LocalGroup, join
from tfdist.coordination.peer_failure import PeerFailureHandler
from tfdist.coordination.server import Server

__all__ = ["Group", "Json", "LocalGroup", "LostMember", "PeerFailureHandler", "RemoteGroup", "Server", "join"]
