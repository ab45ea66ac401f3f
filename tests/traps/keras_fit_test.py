"""The defect of Keras that README.md begins with, on two real processes: a version that mends it fails here."""

import sys

from tfdist.testing import processes

PROGRAM = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
try:
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    print("fit: trained", flush=True)
except Exception as error:
    print("fit:", type(error).__name__, str(error).replace(chr(10), " "), flush=True)
"""


def test_fit_fails_under_multiworker_mirrored() -> None:
    """Guards: `model.fit` under MultiWorkerMirroredStrategy with 2 workers does not train: it cannot read a PerReplica.

    What rests on it: tfdist/trainer.py has a loop of its own instead of wrapping `fit`.
    """
    with processes.job([sys.executable, "-c", PROGRAM], 2) as job:
        for rank in range(2):
            job.wait_for(rank, "fit:", 60)
        outputs = [job.output(rank) for rank in range(2)]
    for output in outputs:
        assert "fit: trained" not in output, "fit works now"
    assert any("PerReplica" in output for output in outputs), outputs
