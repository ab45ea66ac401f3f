"""Communication between replicas inside a step: the `Collectives` contract, its implementations, and the trace check.

All operations take and return lists of tensors. Messages between processes outside of a step are in
`tfdist.coordination`.
"""

from tfdist.collectives.context import current, using
from tfdist.collectives.differentiable import all_gather, all_reduce
from tfdist.collectives.interface import Collectives, Op, Wire
from tfdist.collectives.no_communication import NoCommunication
from tfdist.collectives.recording import RecordedCall, Recording
from tfdist.collectives.rows import gather_rows
from tfdist.collectives.single_replica import OneReplica

__all__ = [
    "RecordedCall",
    "Collectives",
    "OneReplica",
    "Op",
    "Recording",
    "NoCommunication",
    "Wire",
    "all_gather",
    "all_reduce",
    "current",
    "gather_rows",
    "using",
]
