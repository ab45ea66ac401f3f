"""Pipelines whose messages are compressed: they train nearly as well, evaluate exactly, and notice what is not finite."""

import pathlib

import numpy as np
import pytest

from tests.workers import running
from tests.workers.activation_compression import MICRO_BATCHES, ROWS, WIDTH

pytestmark = pytest.mark.processes

METHODS = {"tensorflow": ("none", "int8", "int8/mixed_float16"), "horovod": ("none", "bf16", "int8")}
SPREAD = ", mesh_shape='stage:2;model:2', layout='in:model'"


@pytest.mark.parametrize(
    ("launcher", "stages", "mesh"),
    [
        pytest.param("tensorflow", 2, "", marks=pytest.mark.smoke("pipeline")),
        ("horovod", 3, ""),
        pytest.param("tensorflow", 2, SPREAD, marks=pytest.mark.full),
    ],
)
def test_training_with_compressed_activations(launcher: str, stages: int, mesh: str, tmp_path: pathlib.Path) -> None:
    methods = METHODS[launcher]
    cut = {2: "second", 3: "first,third"}[stages]
    strategy = f"pipeline(micro_batches={MICRO_BATCHES}, cut='{cut}'{mesh})"
    ranks = running.launched(
        "activation_compression", strategy, stages, tmp_path, *methods, seconds=300, launcher=launcher
    )
    exact = ranks[0]["none"]
    for method in set(methods) & {"bf16", "int8"}:
        found = ranks[0][method]
        assert found["losses"] != exact["losses"], "they are compressed"
        np.testing.assert_allclose(found["losses"], exact["losses"], rtol=1e-2)
        assert found["losses"][-1] < 0.8 * found["losses"][0]
        # Of the same weights, as evaluation compresses nothing, one step later than the last loss.
        assert found["evaluation"] == pytest.approx(exact["evaluation"], rel=1e-2)
    for rank, found in enumerate(ranks):
        for method in methods:
            sent = found[method]["message_bytes"]
            assert sent == found[method]["payload_bytes"] == _bytes(method.split("/")[0], rank, stages)
    if "int8/mixed_float16" in methods:
        overflowed = ranks[0]["int8/mixed_float16"]
        assert overflowed["skipped"] > 0 and overflowed["finite"] and np.isfinite(overflowed["losses"][-1])


def _bytes(method: str, rank: int, stages: int) -> int:
    """Two tensors cross each cut: the skip connection, and what the layer before the cut computes, if it is another one."""
    elements = ROWS // MICRO_BATCHES * WIDTH
    tensors = {2: [2, 2], 3: [1, 1 + 2, 2]}[stages][rank] * MICRO_BATCHES
    return tensors * {"none": 4 * elements, "bf16": 2 * elements, "int8": elements + 4 * elements // 256 + 4}[method]
