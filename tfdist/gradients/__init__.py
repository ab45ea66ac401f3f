"""The way of a gradient from the backward pass to the optimizer."""

from tfdist.gradients.bucket import Bucketed, plan
from tfdist.gradients.reducer import Reducer, Sum

__all__ = ["Bucketed", "Reducer", "Sum", "plan"]
