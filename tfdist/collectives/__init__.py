"""What a replica may say to the others from inside a step: the contract `Collectives`, its engines, and the trace check.

Lists of tensors in, lists out. Messages between processes outside of a step are `tfdist.coordination`.
"""

from tfdist.collectives.context import current, using
from tfdist.collectives.contract import Collectives, Op, Wire
from tfdist.collectives.differentiable import all_gather, all_reduce
from tfdist.collectives.no_communication import Unsent
from tfdist.collectives.recording import Call, Recording
from tfdist.collectives.rows import gather_rows
from tfdist.collectives.single import OneReplica

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
