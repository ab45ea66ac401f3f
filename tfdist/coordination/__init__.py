"""The control plane: how the processes of a job talk to each other outside every graph.

It works when collectives hang, carries small JSON values only, and never a tensor. Built on it here: sync points, at which all
ranks act at the same step, and the watchdog, which reports calls that do not end. Nothing here imports TensorFlow.
"""

from tfdist.coordination.client import RemoteGroup
from tfdist.coordination.failure_detector import FailureDetector, watch
from tfdist.coordination.group import Group, Json, Loss
from tfdist.coordination.join import join
from tfdist.coordination.local import LocalGroup
from tfdist.coordination.server import Server

__all__ = ["Group", "Json", "LocalGroup", "Loss", "RemoteGroup", "Server", "FailureDetector", "join", "watch"]
