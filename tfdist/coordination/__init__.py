"""The control plane: communication between the processes of a job, outside every graph.

It keeps working when collectives hang. It transports small JSON values only, never tensors, and only between processes that
know the job's token. Its server detects the loss of a member by the end of its connection or by missing heartbeats;
`peer_failure` then ends the others. It also contains sync points, at which all ranks act at the same step, the watchdog, which
reports calls that do not return, and what Horovod and MPI need to find their processes. Nothing here imports TensorFlow.
"""

from tfdist.coordination.group import Group, Json, LostMember
from tfdist.coordination.join import LocalGroup, RemoteGroup, join
from tfdist.coordination.peer_failure import PeerFailureHandler
from tfdist.coordination.server import Server

__all__ = ["Group", "Json", "LocalGroup", "LostMember", "PeerFailureHandler", "RemoteGroup", "Server", "join"]
