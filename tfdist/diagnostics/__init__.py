"""Measurements between training steps: replica divergence, compression error and exposed communication.

They run as inspections in `tfdist.trainer`; none of them changes a weight.
"""

from tfdist.diagnostics.auto import Auto
from tfdist.diagnostics.compression_error import CompressionError
from tfdist.diagnostics.contract import Inspection, Site
from tfdist.diagnostics.exposure import Exposure, advice
from tfdist.diagnostics.replica_divergence import GradientNorms, ReplicaDivergence

__all__ = ["Auto", "Exposure", "GradientNorms", "CompressionError", "ReplicaDivergence", "Inspection", "Site", "advice"]
