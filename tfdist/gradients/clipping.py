"""Clipping of reduced gradients, whose result does not depend on the number of replicas."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.errors.formatting import is_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clip:
    """The limits of gradient clipping.

    Attributes:
      norm: maximum global norm: all gradients are scaled by min(1, norm / global norm) (Pascanu et al., 2013,
        arXiv:1211.5063); 0 for no limit.
      value: maximum absolute value of an element; 0 for no limit.
    """

    norm: float = 0.0
    value: float = 0.0

    def __post_init__(self) -> None:
        """Validates the values; raises `InputError`."""
        for name in ("norm", "value"):
            value = getattr(self, name)
            if not is_number(value) or not value >= 0:
                raise InputError(f"Clip: {name} must be a number of at least 0. Received: {value!r}.")

    def __call__(self, gradients: Sequence[tf.Tensor], norm: tf.Tensor) -> list[tf.Tensor]:
        """Returns clipped gradients.

        Args:
          gradients: reduced gradients.
          norm: scalar; their global norm.
        """
        results = list(gradients)
        if self.norm:
            factor = self.norm / tf.maximum(norm, tf.cast(self.norm, norm.dtype))
            results = [gradient * tf.cast(factor, gradient.dtype) for gradient in results]
        if self.value:
            results = [tf.clip_by_value(gradient, -self.value, self.value) for gradient in results]
        return results
