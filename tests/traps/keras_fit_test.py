"""The defect of Keras that README.md begins with, on two real processes: a version that mends it fails here."""

import pathlib
import sys

import pytest

from tfdist.testing import processes

pytestmark = pytest.mark.alone

PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "migration" / "tf_distribute_before.py"


def test_fit_fails_under_multiworker_mirrored() -> None:
    """Guards: `model.fit` under MultiWorkerMirroredStrategy with 2 workers does not train: it cannot read a PerReplica.

    What rests on it: tfdist/stock/ takes the place of what Keras's `fit` does with a strategy.
    """
    with processes.job([sys.executable, str(PROGRAM), "1"], 2) as job:
        outputs = [end.output for end in job.wait(90)]
    for output in outputs:
        assert '"loss"' not in output, "fit works now"
    assert any("PerReplica" in output for output in outputs), outputs
