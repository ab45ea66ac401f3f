"""Measurements between the steps of a training, which they leave as it was: replica divergence, compression error, exposure.

They run as inspections of `tfdist.trainer`; a diagnostic never changes a weight.
"""

from tfdist.diagnostics.auto import Auto
from tfdist.diagnostics.compression_error import CompressionError
from tfdist.diagnostics.contract import Inspection, Site
from tfdist.diagnostics.exposure import Exposure, advice
from tfdist.diagnostics.replica_divergence import GradientNorms, ReplicaDivergence

__all__ = ["Auto", "Exposure", "GradientNorms", "CompressionError", "ReplicaDivergence", "Inspection", "Site", "advice"]
