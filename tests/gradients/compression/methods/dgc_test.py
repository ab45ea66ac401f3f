"""Deep gradient compression, compared with the paper's algorithm in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.replicas import Runner
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.gradients.compression.methods.sparsification import DGC


def reference(gradients, ratio, momentum, clip_norm=None, warmup_steps=0, warmup_ratio=0.25):
    """Runs algorithms 1 and 4 of the paper on gradients [steps, replicas, n]; returns each step's sums and states."""
    steps, replicas, size = gradients.shape
    u, v = np.zeros((replicas, size)), np.zeros((replicas, size))
    made = []
    for t in range(steps):
        share = ratio if t >= warmup_steps else warmup_ratio * (ratio / warmup_ratio) ** (t / warmup_steps)
        k = max(1, round(share * size))
        total = np.zeros(size)
        for r in range(replicas):
            g = gradients[t, r].astype("float64")
            if clip_norm is not None:
                threshold = clip_norm * replicas**-0.5
                g = g * min(1, threshold / np.linalg.norm(g))
            u[r] = momentum * u[r] + g
            v[r] = v[r] + u[r]
            mask = np.zeros(size, bool)
            mask[np.argsort(-np.abs(v[r]))[:k]] = True
            total += np.where(mask, v[r], 0)
            u[r], v[r] = np.where(mask, 0, u[r]), np.where(mask, 0, v[r])
        made.append((total, u.copy(), v.copy(), k))
    return made


@pytest.mark.parametrize(
    "parameters",
    [
        {"ratio": 0.05, "momentum": 0.9},
        {"ratio": 0.05, "momentum": 0.5, "clip_norm": 3.0},
        {"ratio": 0.01, "momentum": 0.9, "warmup_steps": 4},
        {"ratio": 0.1, "momentum": 0.0, "warmup_steps": 2, "warmup_ratio": 1.0},
    ],
    ids=["plain", "clipped", "warmup", "no momentum"],
)
def test_reference(mirrored4, parameters):
    shape, steps = (10, 20), 8
    gradients = np.random.default_rng(0).standard_normal((steps, 4, 200)).astype("float32")
    gradients[:, :, :20] *= 5
    run = Runner(mirrored4, DGC(**parameters), [gradients[0].reshape(4, *shape)])
    made = run.steps([[step.reshape(4, *shape)] for step in gradients])
    for t, (step, (total, u, v, k)) in enumerate(zip(made, reference(gradients, **parameters), strict=True)):
        for replica in range(4):
            np.testing.assert_allclose(step.totals[replica][0].ravel(), total, rtol=1e-4, atol=1e-5)
            velocity, residual, count = step.state[replica]
            np.testing.assert_allclose(velocity.ravel(), u[replica], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(residual.ravel(), v[replica], rtol=1e-4, atol=1e-5)
            assert np.count_nonzero(step.sent[replica][0]) == k
            assert count == t + 1


@pytest.mark.parametrize("size", [1, 7, 1000, 40_000])
def test_payload(size):
    """Measured at each step: the warmup sends no more than its own k requires."""
    reducer = DGC(ratio=0.01, warmup_steps=2, warmup_ratio=0.16)
    x = tf.constant(np.random.default_rng(2).standard_normal(size).astype("float32"))
    state = [tf.zeros([size]), tf.zeros([size]), tf.constant(0)]
    for ratio in (0.16, 0.04, 0.01, 0.01):
        recording = RecordingCollectives(OneReplica())
        state = reducer.reduce([x], state, recording, name="g").state
        assert recording.payload_bytes == 8 * (max(1, round(ratio * size)) + 1)


def test_payload_is_known_when_traced(mirrored4):
    x = np.random.default_rng(3).standard_normal((4, 40_000)).astype("float32")
    x[:, 100:] = 0  # fewer than k nonzero elements
    run = Runner(mirrored4, DGC(ratio=0.01), [x])
    step = run([x], run.initial())
    assert step.payload_bytes == 8 * (400 + 1)
    assert DGC(ratio=0.01).keeps_shapes
    np.testing.assert_allclose(step.totals[0][0], x.sum(0), rtol=1e-5, atol=1e-6)
