"""What a replica may say to the others of its group from inside a step: the `Collectives` contract."""

from tfdist.collectives.contract import Collectives, Op, Wire
from tfdist.collectives.current import current, using
from tfdist.collectives.differentiable import all_gather, all_reduce
from tfdist.collectives.one_replica import OneReplica
from tfdist.collectives.recording import Call, Recording
from tfdist.collectives.rows import gather_rows
from tfdist.collectives.unsent import Unsent

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
