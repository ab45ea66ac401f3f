"""The way of a gradient from the backward pass to the optimizer."""

from tfdist.gradients.accumulation import accumulated
from tfdist.gradients.bucket import Bucketed, plan
from tfdist.gradients.clipping import Clip
from tfdist.gradients.feedback import ErrorFeedback
from tfdist.gradients.loss_scale import LossScale, LossScaler, parse_loss_scale, unscaled
from tfdist.gradients.reducer import Reduced, Reducer, Sum
from tfdist.gradients.routed import Routed

__all__ = [
    "Bucketed",
    "Clip",
    "ErrorFeedback",
    "LossScale",
    "LossScaler",
    "Reduced",
    "Reducer",
    "Routed",
    "Sum",
    "accumulated",
    "parse_loss_scale",
    "plan",
    "unscaled",
]
