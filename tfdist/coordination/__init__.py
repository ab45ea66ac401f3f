"""The control plane: communication between the processes of a job, outside every graph.

It keeps working when collectives hang. It transports small JSON values only, never tensors, and only between processes that
know the job's token. Its server notices that a member is lost: its connection ends, or nothing comes from it; `peer_failure`
is what the others do then. Built on it are sync points, at which all ranks act at the same step, the watchdog, which reports
calls that do not return, and what Horovod and MPI need to find their processes. Nothing here imports TensorFlow.
"""

from tfdist.coordination.group import Group, Json, LostMember
from tfdist.coordination.join import LocalGroup, RemoteGroup, join
from tfdist.coordination.peer_failure import FailureDetector, watch
from tfdist.coordination.server import Server

__all__ = ["Group", "Json", "LocalGroup", "LostMember", "RemoteGroup", "Server", "FailureDetector", "join", "watch"]
