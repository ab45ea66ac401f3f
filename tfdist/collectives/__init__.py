"""Communication between replicas inside a step: the `Collectives` contract, its implementations, and the trace check.

All operations take and return lists of tensors. Messages between processes outside of a step are in
`tfdist.coordination`.
"""

from tfdist.collectives.context import current, using
from tfdist.collectives.differentiable import all_gather, all_reduce
from tfdist.collectives.interface import Collectives, Op, Wire
from tfdist.collectives.no_communication import Unsent
from tfdist.collectives.recording import Call, Recording
from tfdist.collectives.rows import gather_rows
from tfdist.collectives.single_replica import OneReplica

__all__ = [
    "Call",
    "Collectives",
    "OneReplica",
    "Op",
    "Recording",
    "Unsent",
    "Wire",
    "all_gather",
    "all_reduce",
    "current",
    "gather_rows",
    "using",
]
