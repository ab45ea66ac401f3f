"""Reduces given gradients by PowerSGD with error feedback.

The directory contains case.pickle: the text of the method and gradients [steps][tensors], each [ranks, ...]. Returns the result
of each step.
"""

import pathlib
import pickle
from typing import Any

import tensorflow as tf

import tfdist
from tfdist.collectives import Recording
from tfdist.gradients.compression import create
from tfdist.grammar.rules import parse_rules


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> dict[str, Any]:
    text, gradients = pickle.loads((directory / "case.pickle").read_bytes())
    mine = [[tf.constant(values[strategy.cluster.rank]) for values in step] for step in gradients]
    [rule] = parse_rules(text)
    reducer, recording = create(rule.methods), Recording(strategy.collectives)
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype, f"variable{i}") for i, tensor in enumerate(mine[0])]
    states = reducer.state(specs)
    variables = strategy.allocate(states)

    @tf.function(autograph=False)
    def reduce(tensors: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        reduced = reducer.reduce(tensors, [variable.value() for variable in variables], recording, name="gradients")
        for variable, value in zip(variables, reduced.state, strict=True):
            variable.assign(value)
        return reduced.totals, reduced.state

    steps = [[[x.numpy() for x in part] for part in reduce(tensors)] for tensors in mine]
    return {"steps": steps, "names": [state.name for state in states], "payload": recording.payload_bytes}
