"""One of several Horovod ranks that reduce given gradients by PowerSGD with error feedback.

    python tests/gradients/compression/powersgd_worker.py DIRECTORY RANK

DIRECTORY holds case.pickle: the text of the method and gradients [steps][tensors], each [ranks, ...]; what each step made of
them is written beside it.
"""

import pathlib
import pickle
import sys

import tensorflow as tf

import tfdist
from tfdist.collectives import Recording
from tfdist.gradients.compression import create
from tfdist.grammar.rules import parse_rules


def main(directory: str, rank: str) -> None:
    strategy = tfdist.load_strategy("horovod", start_timeout_seconds=60)
    text, gradients = pickle.loads(pathlib.Path(directory, "case.pickle").read_bytes())
    mine = [[tf.constant(values[int(rank)]) for values in step] for step in gradients]
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
    made = {"steps": steps, "names": [state.name for state in states], "payload": recording.payload_bytes}
    pathlib.Path(directory, f"{rank}.pickle").write_bytes(pickle.dumps(made))
    strategy.group.barrier("done")
    strategy.group.leave()
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
