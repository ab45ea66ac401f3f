"""Processing of gradients between backward pass and optimizer: reduction, accumulation, clipping and loss scaling.

A reducer sums tensors over replicas and does not know that they are gradients. Compression methods are in
`compression/`.
"""

from tfdist.gradients.accumulation import accumulated
from tfdist.gradients.bucket import Bucketed, plan
from tfdist.gradients.clipping import Clip
from tfdist.gradients.loss_scale import LossScale, LossScaler, parse_loss_scale, unscaled
from tfdist.gradients.reducer import ErrorFeedback, PartitionedReducer, Reduced, Reducer, Sum

__all__ = [
    "Bucketed",
    "Clip",
    "ErrorFeedback",
    "LossScale",
    "LossScaler",
    "Reduced",
    "Reducer",
    "PartitionedReducer",
    "Sum",
    "accumulated",
    "parse_loss_scale",
    "plan",
    "unscaled",
]
