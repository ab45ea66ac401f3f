"""Programs that others wrote for Keras's `fit` run with `Trainer.fit` instead, without any other change."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.separable]

ROOT = pathlib.Path(__file__).parents[1]
PROGRAMS = (
    "guides/masking_and_padding",
    "guides/working_with_rnns",
    "tabular/imbalanced_classification",
    "timeseries/temporal_sample_weight",
)


def histories(by: str, program: str, directory: pathlib.Path) -> list[dict[str, list[float]]]:
    """Returns what each `fit` of a program returned; the directory is its working directory."""
    command = [sys.executable, str(ROOT / "trainer/fit_by_trainer.py"), by, str(ROOT / f"programs/{program}.py")]
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command,
        cwd=directory,
        env=os.environ | threads,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_only_fit_is_replaced(program: str, tmp_path: pathlib.Path) -> None:
    """Orders of examples, and chance, differ from Keras's, so that losses are compared roughly: not half, not twice."""
    ours, keras = histories("trainer", program, tmp_path), histories("keras", program, tmp_path)
    assert len(ours) == len(keras) > 0
    for found, expected in zip(ours, keras, strict=True):
        assert {name: len(values) for name, values in found.items()} == {n: len(v) for n, v in expected.items()}
        assert found["loss"][0] == pytest.approx(expected["loss"][0], rel=0.3)
