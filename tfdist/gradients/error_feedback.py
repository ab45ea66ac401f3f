"""Error feedback: what a lossy sum left out of a step is added to the next one.

    x = g + e,   total = sum over replicas of sent(x),   e' = x - sent(x)

What was sent and the remaining error add up to the sum of all gradients so far, so nothing is lost, only delayed. Each
replica stores its own error: one tensor of the size of each gradient.

Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019
(arXiv:1901.09847).
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State
from tfdist.gradients.reducer import Reduced, Reducer, split_at


class ErrorFeedback(Reducer):
    """Stores what another reducer did not send, and adds it to the next sum.

    Around an exact reducer, it sends the error that an earlier, lossy one has left; afterwards there is none.
    """

    def __init__(self, inner: Reducer):
        """Wraps a reducer.

        Args:
          inner: a reducer, usually lossy.
        """
        self.inner = inner
        self.keeps_shapes = inner.keeps_shapes

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class: one error per tensor, then the inner reducer's state."""
        errors = [State(f"{spec.name}/error", tuple(spec.shape), spec.dtype, per_replica=True) for spec in specs]
        return errors + self.inner.state(specs)

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class."""
        errors, rest = split_at(state, len(tensors))
        wanted = [tensor + error for tensor, error in zip(tensors, errors, strict=True)]
        inner = self.inner.reduce(wanted, rest, collectives, name=name)
        left = [x - sent for x, sent in zip(wanted, inner.sent, strict=True)]
        return Reduced(inner.totals, inner.sent, left + inner.state, inner.witnesses)
