"""Gradient processing between the backward pass and the optimizer: reduction, accumulation, clipping, loss scaling.

In a step, gradients are unscaled, accumulated over micro-steps, reduced, and then clipped. A reducer sums tensors over replicas
and does not know that they are gradients. Compression methods are in `compression/`.
"""

from tfdist.gradients.accumulation import Clip, accumulate_gradients
from tfdist.gradients.bucket import Bucketed, plan
from tfdist.gradients.loss_scale import LossScale, LossScaler, parse_loss_scale, unscale
from tfdist.gradients.reducer import ErrorFeedback, PartitionedReducer, Reducer, ReductionResult, Sum

__all__ = [
    "Bucketed",
    "Clip",
    "ErrorFeedback",
    "LossScale",
    "LossScaler",
    "ReductionResult",
    "Reducer",
    "PartitionedReducer",
    "Sum",
    "accumulate_gradients",
    "parse_loss_scale",
    "plan",
    "unscale",
]
