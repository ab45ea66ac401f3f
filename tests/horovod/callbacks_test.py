"""Individual callbacks of Horovod, in one process without an engine."""

import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd


def test_logs_that_are_vectors_are_averaged(monkeypatch):
    """Simulates a second rank with three times the values of this one."""
    monkeypatch.setattr("tfdist.horovod.callbacks.allreduce", lambda x, op: tf.constant(2.0, x.dtype) * x)
    logs = {"loss": 1.5, "recall": np.array([[0.25, 0.5]], "float32"), "count": np.float32(2)}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert (logs["loss"], logs["count"]) == (3.0, 4.0)
    assert isinstance(logs["loss"], float)
    np.testing.assert_array_equal(logs["recall"], [[0.5, 1.0]])
