"""The control plane: how the processes of a job speak to each other outside every graph.

It works when collectives hang, carries small JSON values only, and never a tensor. Nothing here imports TensorFlow.
"""

from tfdist.group.client import RemoteGroup
from tfdist.group.contract import Group, Json, Loss
from tfdist.group.joining import join
from tfdist.group.local import LocalGroup
from tfdist.group.server import Server
from tfdist.group.watching import Watch, watch

__all__ = ["Group", "Json", "LocalGroup", "Loss", "RemoteGroup", "Server", "Watch", "join", "watch"]
