"""Communication between replicas inside a step: the `Collectives` interface, its implementations, and the trace check.

All operations take and return lists of tensors. Messages between processes outside of a step are in
`tfdist.coordination`.
"""

from tfdist.collectives.differentiable import OneReplica, all_gather, all_reduce, collectives_scope, current
from tfdist.collectives.forwarding import NoCommunication, RecordedCall, RecordingCollectives
from tfdist.collectives.interface import Collectives, Op, SupportedDtypes
from tfdist.collectives.rows import gather_rows

__all__ = [
    "RecordedCall",
    "Collectives",
    "OneReplica",
    "Op",
    "RecordingCollectives",
    "NoCommunication",
    "SupportedDtypes",
    "all_gather",
    "all_reduce",
    "current",
    "gather_rows",
    "collectives_scope",
]
