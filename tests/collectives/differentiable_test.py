"""Gradients through communication equal those on one device that has all inputs."""

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import op_selector

from tfdist.collectives import all_gather, all_reduce

INPUTS = np.random.default_rng(0).standard_normal((4, 3))


def test_gradients_of_gradients(strategy, run):
    """Each replica's loss is sum_s x_s^3 + t^3 with t = sum_s x_s; differentiates the sum of all first gradients."""

    def step(collectives):
        x = tf.gather(tf.constant(INPUTS), collectives.rank)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                everyone = all_gather(collectives, x, name="everyone")
                total = all_reduce(collectives, x, name="total")
                loss = tf.reduce_sum(everyone**3) + tf.reduce_sum(total**3)
            first = inner.gradient(loss, x)
        return first, outer.gradient(first, x)

    n = strategy.replicas
    t = INPUTS[:n].sum(0)
    for x, (first, second) in zip(INPUTS, run(strategy, step), strict=False):
        np.testing.assert_allclose(first, 3 * n * (x**2 + t**2), rtol=1e-12)
        np.testing.assert_allclose(second, 6 * n * (x + n * t), rtol=1e-12)


def test_what_tensorflow_searches_for_variables_does_not_grow_with_the_model(mirrored2, monkeypatch):
    """Otherwise, tracing a deep model with synchronized BatchNorm would take minutes."""
    searches = []
    search = op_selector.get_backward_walk_ops

    def counted(*args, **kwargs):
        found = search(*args, **kwargs)
        searches.append(len(found))
        return found

    def longest(depth):
        def step():
            x = y = tf.cast(mirrored2.collectives.rank, tf.float64)[None]
            with tf.GradientTape() as tape:
                tape.watch(x)
                for _ in range(depth):
                    y = tf.sin(y)
                everyone = all_gather(mirrored2.collectives, y, name="everyone")
                total = all_reduce(mirrored2.collectives, tf.reduce_sum(everyone), name="total")
                for _ in range(depth):
                    total = tf.sin(total)
            return tape.gradient(total, x)

        searches.clear()
        tf.function(lambda: mirrored2.run(step), autograph=False).get_concrete_function()
        return max(searches)

    monkeypatch.setattr(op_selector, "get_backward_walk_ops", counted)
    assert longest(5) == longest(50)
