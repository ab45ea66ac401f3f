"""`--optimizer=lamb` is `keras.optimizers.Lamb`: comparison with the paper's algorithm in NumPy, and Keras's difference."""

import keras
import numpy as np
import pytest

from tests.optimizers.comparisons import largest_difference

BETA_1, BETA_2, EPSILON, RATE = 0.9, 0.999, 1e-6, 0.05


def reference(starts, gradients, decay=0.0, apart=0.0):
    """Algorithm 2 of You et al., arXiv:1904.00962, with the identity for phi.

    `decay` is the paper's weight decay, a part of the update whose norm is taken; `apart` multiplies the weights by
    1 - rate * apart before it.
    """
    w = {path: value.copy() for path, value in starts.items()}
    m, v = ({path: np.zeros_like(value) for path, value in starts.items()} for _ in range(2))
    for t, step in enumerate(gradients, start=1):
        for path, g in step.items():
            w[path] = w[path] * (1 - RATE * apart)
            m[path] = BETA_1 * m[path] + (1 - BETA_1) * g
            v[path] = BETA_2 * v[path] + (1 - BETA_2) * g**2
            r = (m[path] / (1 - BETA_1**t)) / (np.sqrt(v[path] / (1 - BETA_2**t)) + EPSILON) + decay * w[path]
            norms = np.linalg.norm(w[path]), np.linalg.norm(r)
            w[path] = w[path] - RATE * (norms[0] / norms[1] if all(norms) else 1.0) * r
    return w


def lamb(**options):
    return lambda: keras.optimizers.Lamb(RATE, BETA_1, BETA_2, EPSILON, **options)


@pytest.mark.parametrize("strategy", ["single", "mirrored2"])
def test_keras_s_is_the_paper_s_without_weight_decay(strategy, starts, gradients, train, float64, request):
    found = train(request.getfixturevalue(strategy), lamb())
    # Keras computes 1 - beta in Python, so that rounding errors are larger than those of float64.
    assert largest_difference(found, reference(starts, gradients)) < 1e-6


def test_keras_s_weight_decay_stands_outside_of_the_trust_ratio(starts, gradients, train, single, float64):
    """In the paper it is inside. If this fails, Keras has changed: update the documentation."""
    found = train(single, lamb(weight_decay=0.1))
    assert largest_difference(found, reference(starts, gradients, apart=0.1)) < 1e-6
    assert largest_difference(found, reference(starts, gradients, decay=0.1)) > 1e-3
