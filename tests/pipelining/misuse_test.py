"""Mistakes in programs with a pipeline: each process raises the same error, of one line."""

import sys

import pytest

from tests import processes

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


@pytest.mark.processes
def test_every_process_refuses_a_mistake_in_one_line() -> None:
    with processes.job([sys.executable, "-m", "tests.pipelining.misuse_worker", "stage:2", "", *REFUSED], 2) as job:
        ended = job.wait(300)
    for end in ended:
        assert end.code == 0, end.output
        said = dict(line.split(": ", 1) for line in end.output.splitlines() if ": " in line)
        for name, message in REFUSED.items():
            assert said[name].startswith(f"InputError: {message}"), said[name]


@pytest.mark.processes
def test_what_dtensor_cannot_compile_on_an_axis_model_is_named_in_one_line() -> None:
    worker = ["tests.pipelining.misuse_worker", "stage:1;model:2", "ffn:model", "operation"]
    with processes.job([sys.executable, "-m", *worker], 1) as job:
        [end] = job.wait(300)
    [line] = [line for line in end.output.splitlines() if line.startswith("operation: ")]
    assert line.startswith(
        "operation: InputError: On a mesh, a model must consist of operations that DTensor supports. Received: "
    )
    assert "tf.Timestamp (" in line and "hidden_1/Timestamp), which has no layouts. Compute it in the data" in line
