"""Scripts structured like Horovod's own examples, with the import line changed, compared with one process."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import processes
from tests.horovod.jobs import ENVIRONMENT, WITHOUT_HOROVOD, launched

pytestmark = pytest.mark.processes

HERE = pathlib.Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "horovod"
OURS = "import tfdist.horovod as hvd\n"
RATE = 0.006


@pytest.mark.parametrize(
    ("ranks", "through"),
    [
        pytest.param(2, [], marks=pytest.mark.full),
        (3, []),
        pytest.param(2, [WITHOUT_HOROVOD], marks=pytest.mark.full),
    ],
)
def test_scripts_with_the_import_changed_are_one_process(ranks, through, tmp_path):
    """Ranks are bitwise equal; weights and metrics equal those of one rank with global batches to 1e-9 of their norm.

    optimizer_test.py compares the optimizer and the tape with plain Keras.
    """
    worker, alone = str(HERE / "examples_worker.py"), tmp_path / "alone"
    alone.mkdir()
    reference = [sys.executable, worker, str(alone), str(RATE), str(ranks)]
    done = subprocess.run(reference, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, *through, worker, str(tmp_path), str(RATE / ranks)]
    with processes.job(command, ranks, ENVIRONMENT) as job:
        ended = job.wait(300)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.output for end in ended)
    assert "finished gradual learning rate warmup to 0.006" in ended[0].output
    assert "Images per second on all ranks" in ended[0].output
    rates = np.load(tmp_path / "keras_fit-0.npz")["history/lr"]
    np.testing.assert_allclose(rates, [RATE / ranks * (1 + (ranks - 1) / 2), RATE, RATE], rtol=1e-6)
    for name in ("keras_fit", "gradient_tape", "synthetic_benchmark"):
        expected = np.load(alone / f"{name}-0.npz")
        found = [np.load(tmp_path / f"{name}-{rank}.npz") for rank in range(ranks)]
        for key in expected.files:
            assert len({rank[key].tobytes() for rank in found}) == 1, f"{name}: {key} differs between ranks"
            difference = np.linalg.norm(found[0][key] - expected[key]) / np.linalg.norm(expected[key])
            assert difference < 1e-9, (name, key, difference)


@pytest.mark.full
def test_the_same_script_with_horovods_own_import_reduces_nothing(tmp_path):
    """Guards Horovod's worst trap: under Keras 3, its own optimizer silently trains each rank alone."""
    text = (EXAMPLES / "keras_fit.py").read_text()
    assert text.count(OURS) == 1
    weights = {}
    for name in ("tfdist.horovod", "horovod.tensorflow.keras", "horovod.keras"):
        script = tmp_path / f"{name}.py"
        script.write_text(text.replace(OURS, f"import {name} as hvd\n"))
        command = [str(script), "--plain", f"--output={tmp_path}/{name}-{{rank}}.npz"]
        command = launched(command, f"--log_dir={tmp_path}/log")
        done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        ranks = [np.load(tmp_path / f"{name}-{rank}.npz") for rank in range(2)]
        weights[name] = [np.concatenate([rank[k].ravel() for k in rank.files if "weight" in k]) for rank in ranks]
    distance = {name: float(np.linalg.norm(a - b)) for name, (a, b) in weights.items()}
    assert distance["tfdist.horovod"] == 0, json.dumps(distance)
    assert min(distance["horovod.tensorflow.keras"], distance["horovod.keras"]) > 1e-2, (
        "Horovod's optimizer reduces now"
    )
