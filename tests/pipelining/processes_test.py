"""Programs on the processes of a pipeline: mistakes, weights that must be equal, and those of a whole model."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest

from tests.workers import running, stage_weights

pytestmark = pytest.mark.processes

OF_ITS_STAGES = "A process of a pipeline has the weights of its own stages only"
REFUSED = {
    "targets": "Every process must read the same batches in the same order",
    "form": "training data: form of an example differs",
    "activation": 'layer hidden: activation differs: rank 0 has "relu", rank 1 has "tanh"',
    "rate": 'optimizer sgd: learning_rate differs: rank 0 has "0.1',
    "width": "Model, loss and metrics must fit the data. Received: examples with x float32[2], y float32[1]; ValueError: ",
    "freeze": "A Trainer trains the variables that were trainable when it was built",
    "state": "Layers of a pipeline must not compute with state that they assign in training, because one device would "
    "assign it once per step. Received: centering/center, with 2 micro-batches and 1 replica.",
    "spectral": "Layers of a pipeline must not compute with state that they assign in training",
    "predict": f"{OF_ITS_STAGES}. Received: a call to predict of the model.",
    "call": f"{OF_ITS_STAGES}. Received: a read of a weight of another stage.",
}


def test_every_process_refuses_a_mistake_in_one_line(tmp_path: pathlib.Path) -> None:
    strategy = "pipeline(mesh_shape='stage:2', micro_batches=2)"
    for said in running.outcomes("misuse", strategy, 2, tmp_path, *REFUSED, seconds=300):
        for name, message in REFUSED.items():
            assert said[name].startswith(f"InputError: {message}") and "\n" not in said[name], said[name]


def test_what_dtensor_cannot_compile_on_an_axis_model_is_named_in_one_line(tmp_path: pathlib.Path) -> None:
    strategy = "pipeline(mesh_shape='stage:1;model:2', layout='ffn:model', micro_batches=2)"
    [said] = running.outcomes("misuse", strategy, 1, tmp_path, "operation", seconds=300)
    line = said["operation"]
    assert line.startswith(
        "InputError: On a mesh, a model must consist of operations that DTensor supports. Received: "
    )
    assert (
        "tf.Timestamp (" in line
        and "hidden_1/Timestamp), which has no layouts. Compute it in the input pipeline" in line
    )
    assert "\n" not in line


def test_weights_of_stages(tmp_path: pathlib.Path) -> None:
    """What must be equal is so, although each process has drawn its own, and each keeps what it has of a whole model.

    Over Horovod, as tests/strategies has replicas over TensorFlow only.
    """
    keras.utils.set_random_seed(3)
    whole = stage_weights.model_of()
    whole.save_weights(tmp_path / "pretrained.weights.h5")
    strategy = "pipeline(mesh_shape='stage:2;data:2', micro_batches=2)"
    ranks = running.launched("stage_weights", strategy, 4, tmp_path, seconds=300, launcher="horovod")
    check_drawn([drawn for drawn, _ in ranks])
    assert len(keras.models.load_model(tmp_path / "model.keras").variables) > len(ranks[0][0]["before"])
    expected = {variable.path: np.asarray(variable).tolist() for variable in whole.variables}
    for _, found in ranks:
        for when in ("scope", "outside", "after", "set"):
            assert found[when] and found[when].items() <= expected.items(), when
        assert found["read"]
        for refused in ("get", "save"):
            assert found[refused].startswith(f"InputError: {OF_ITS_STAGES}")
    assert set().union(*(found["after"] for _, found in ranks)) == expected.keys()


def check_drawn(ranks: list[dict[str, Any]]) -> None:
    first, second, third, fourth = ranks
    for when in ("before", "after"):
        assert first[when] == second[when] and third[when] == fourth[when]  # replicas of a stage
        shared = first[when].keys() & third[when].keys()
        assert len(shared) == 1
        assert all(first[when][path] == third[when][path] for path in shared)
    assert first["before"] != first["after"]
    assert OF_ITS_STAGES in first["other"]
