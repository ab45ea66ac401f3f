"""Threshold sparsification: sends every element of at least a given magnitude."""

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.errors import InputError
from tfdist.errors.formatting import is_number
from tfdist.gradients.compression.reducers import ReducedVector, Vectorwise, finiteness_flag
from tfdist.gradients.compression.sparse_vector import exchange, magnitudes, select_by_threshold


class Threshold(Vectorwise):
    """Sends all elements of at least a given magnitude, however many there are.

        C(x)_i = x_i if |x_i| >= value, else 0;   |x - C(x)|_inf < value

    Cost: 8 (m + 1) bytes for the m elements that reach the value (a value and an index for each, and one pair for m and
    the finiteness flag), which each replica receives from N - 1 others; more than an exact sum if m > n / N. m
    differs between replicas and steps. Experimental, because no single value suits all tensors and all of the training.

    Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, 2015; Dryden et al., Communication
    Quantization for Data-Parallel Training of Deep Neural Networks, 2016.
    """

    biased = True
    experimental = True

    def __init__(self, *, value: float):
        """Validates and stores the parameters.

        Args:
          value: smallest magnitude that is sent, in units of the gradient, above 0.
        """
        if not is_number(value) or not 0 < value < math.inf:
            raise InputError(
                f"threshold needs a finite value above 0. Received: {value!r}. Write, say, threshold(value=0.001)."
            )
        self._bits = max(1, int(np.float32(min(float(value), float(np.finfo(np.float32).max))).view(np.int32)))

    def reduce_vector(
        self, x: tf.Tensor, state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> ReducedVector:
        selection = select_by_threshold(x, self._bits)
        total, checks = exchange(*selection, finiteness_flag(selection.values), x.shape[0], collectives, name=name)
        return ReducedVector(total, tf.where(magnitudes(x) >= self._bits, x, 0.0), [], checks)
