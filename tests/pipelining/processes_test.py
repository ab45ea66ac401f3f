"""Programs on the processes of a pipeline: mistakes, weights that must be equal, and those of a whole model."""

import pathlib

import keras
import numpy as np
import pytest

from tests.workers import pretrained, running

pytestmark = pytest.mark.processes

REFUSED = {
    "targets": "Every process must read the same batches, in the same order",
    "form": "training data: form of an example differs",
    "activation": 'layer hidden: activation differs: rank 0 has "relu", rank 1 has "tanh"',
    "rate": 'optimizer sgd: learning_rate differs: rank 0 has "0.1',
    "width": "Model, loss and metrics must fit the data. Received: examples with x float32[2], y float32[1]; ValueError: ",
    "freeze": "A trainer trains the variables that were trainable when it was built",
    "state": "Layers of a pipeline must not compute with state that they assign in training, as one device would assign it "
    "once in a step. Received: centering/center, with 2 micro-batches and 1 replica.",
    "spectral": "Layers of a pipeline must not compute with state that they assign in training",
    "predict": "A process of a pipeline has the weights of its own stages only. Received: a call of predict of the model.",
    "call": "A process of a pipeline has the weights of its own stages only. Received: a read of a weight of another stage.",
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
    assert "tf.Timestamp (" in line and "hidden_1/Timestamp), which has no layouts. Compute it in the data" in line
    assert "\n" not in line


def test_replicas_and_stages_begin_with_equal_weights(tmp_path: pathlib.Path) -> None:
    """Although each process has drawn its own; over Horovod, as tests/strategies has replicas over TensorFlow only."""
    strategy = "pipeline(mesh_shape='stage:2;data:2', micro_batches=2)"
    ranks = running.launched("equal_values", strategy, 4, tmp_path, seconds=300, launcher="horovod")
    first, second, third, fourth = ranks
    for when in ("before", "after"):
        assert first[when] == second[when] and third[when] == fourth[when]  # replicas of a stage
        shared = first[when].keys() & third[when].keys()
        assert len(shared) == 1
        assert all(first[when][path] == third[when][path] for path in shared)
    assert first["before"] != first["after"]
    assert "has the weights of its own stages only" in first["other"]
    assert len(keras.models.load_model(tmp_path / "model.keras").variables) > len(first["before"])


def test_each_process_keeps_the_pretrained_weights_of_its_stages(tmp_path: pathlib.Path) -> None:
    keras.utils.set_random_seed(3)
    whole = pretrained.model_of()
    whole.save_weights(tmp_path / "pretrained.weights.h5")
    expected = {variable.path: np.asarray(variable).tolist() for variable in whole.variables}
    ranks = running.outcomes("pretrained", "pipeline(mesh_shape='stage:2', micro_batches=2)", 2, tmp_path, seconds=300)
    for found in ranks:
        for when in ("scope", "outside", "after", "set"):
            assert found[when] and found[when].items() <= expected.items(), when
        assert found["read"]
        for refused in ("get", "save"):
            assert found[refused].startswith(
                "InputError: A process of a pipeline has the weights of its own stages only"
            )
    assert ranks[0]["after"].keys() | ranks[1]["after"].keys() == expected.keys()
