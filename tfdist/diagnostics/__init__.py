"""Measurements between training steps: replica divergence, compression error, communication and timelines of pipelines.

They run as inspections in `tfdist.trainer`; none of them changes a weight. `auto_all_reduce` and `auto_compression` measure
to choose the all-reduce algorithm and the compression method.
"""

from tfdist.diagnostics.auto_all_reduce import AutoAllReduce
from tfdist.diagnostics.auto_compression import AutoCompression
from tfdist.diagnostics.interface import Inspection, RunView
from tfdist.diagnostics.pipeline_timeline import Exposure, PipelineTimeline, advice
from tfdist.diagnostics.replica_divergence import CompressionErrorMonitor, GradientNorms, ReplicaDivergence

__all__ = [
    "AutoCompression",
    "AutoAllReduce",
    "Exposure",
    "GradientNorms",
    "CompressionErrorMonitor",
    "PipelineTimeline",
    "ReplicaDivergence",
    "Inspection",
    "RunView",
    "advice",
]
