"""Measurements between training steps: replica divergence, compression error and exposed communication.

They run as inspections in `tfdist.trainer`; none of them changes a weight.
"""

from tfdist.diagnostics.auto_compression import Auto
from tfdist.diagnostics.compression_error import CompressionError
from tfdist.diagnostics.exposure import Exposure, advice
from tfdist.diagnostics.interface import Inspection, Site
from tfdist.diagnostics.replica_divergence import GradientNorms, ReplicaDivergence

__all__ = ["Auto", "Exposure", "GradientNorms", "CompressionError", "ReplicaDivergence", "Inspection", "Site", "advice"]
