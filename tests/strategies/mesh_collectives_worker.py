"""Compiles steps on meshes, and writes the collectives that DTensor's compiler inserts into each program.

    python tests/strategies/mesh_collectives_worker.py CASES FOLDER

CASES is JSON, a list of {"model", "arguments", "strategy"}: a model of `tfdist.models`, its arguments, and options of the mesh.
For each case, FOLDER/N.json gets [[kind, axis, bytes], ...] of one device's tensors, before the compiler combines messages.
Scalars, such as metrics and norms, are left out.
"""

import itertools
import json
import math
import os
import pathlib
import re
import sys

BYTES = {"i1": 1, "bf16": 2, "f16": 2, "f32": 4, "i32": 4, "f64": 8, "i64": 8}
KINDS = {
    "AllReduce": "all-reduce",
    "ReduceScatter": "all-reduce",  # as it is implemented on a CPU
    "AllToAll": "all-to-all",
}
CONSTANT = re.compile(r'(%\w+) = "tf\.Const"\(\) <\{value = dense<(\[\[.*?\]\])> : tensor<\d+x\d+xi32>')
COLLECTIVE = re.compile(r'"tf\.DTensor(AllReduce|ReduceScatter|AllToAll)"\(([^)]*)\)(.*) : \(tensor<([^>]*)>')


def train(case):
    import keras
    import numpy as np

    import tfdist

    random = np.random.default_rng(0)
    strategy = tfdist.load_strategy("mesh", environment={}, **case["strategy"])
    with strategy.scope():
        model = getattr(tfdist.models, case["model"])(**case["arguments"])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(model, optimizer="sgd", loss=loss)
    x, y = (8, *model.input_shape[1:]), (8, *model.output_shape[1:-1])
    data = random.integers(0, 9, x).astype(model.inputs[0].dtype), random.integers(0, 9, y)
    trainer.fit(data, batch_size=8, steps=1)
    return strategy.devices.mesh.axes


def program(folder):
    """Returns the text of the largest program, before sums are combined into messages."""
    dumps = {}
    for file in sorted(folder.glob("dtensor.*.mlir")):
        stage, name = re.fullmatch(r".*\.after_(.+)\.([^.]+)\.mlir", file.name).groups()
        dumps.setdefault(name, []).append((stage, file))
    of_step = max(dumps.values(), key=lambda found: max(file.stat().st_size for _, file in found))
    before = itertools.takewhile(
        lambda one: not re.match("DTensorAllReduce(Combine|Lowering)|DTensorCollectiveType", one[0]), of_step
    )
    return list(before)[-1][1].read_text()


def groups(axes, chosen):
    """Returns the groups of devices that communicate along axes, in DTensor's format."""
    found = {}
    for device, place in enumerate(itertools.product(*map(range, axes.values()))):
        found.setdefault(tuple(i for i, axis in zip(place, axes, strict=True) if axis not in chosen), []).append(device)
    return str(list(found.values()))


def collectives(text, axes):
    split = [axis for axis, size in axes.items() if size > 1]
    some = (chosen for n in range(1, len(split) + 1) for chosen in itertools.combinations(split, n))
    along = {groups(axes, chosen): "&".join(chosen) for chosen in some}
    constants, placed, found = {}, set(), []
    for line in text.splitlines():
        if constant := CONSTANT.search(line):
            constants[constant[1]] = constant[2]
        elif "tf.TensorStridedSliceUpdate" in line:  # a shard among zeros, so that the sum is a gather
            placed.add(line.split()[0])
        elif match := COLLECTIVE.search(line):
            name, operands, rest, tensor = match.groups()
            *shape, dtype = tensor.split("x")
            if shape:
                given = operands.split(", ")
                kind = "all-gather" if given[0] in placed else KINDS[name]
                axis = moved(rest) if kind == "all-to-all" else along[constants[given[1]]]
                found.append((kind, axis, math.prod(map(int, shape)) * BYTES[dtype]))
    return found


def moved(attributes):
    """Returns the axis that moves from one dim to another."""
    before, after = (layout.split(",") for layout in re.findall(r"sharding_specs:(.*?), ?mesh", attributes)[:2])
    [axis] = {a for a, b in zip(before, after, strict=True) if a != b and a != "unsharded"}
    return axis


def main(cases, folder):
    dumps = pathlib.Path(folder, "dumps")
    dumps.mkdir()
    os.environ.update(  # read when TensorFlow is imported
        TF_CPP_VMODULE="dtensor_mlir_passes=1", TF_DUMP_GRAPH_PREFIX=str(dumps), TF_DUMP_GRAPH_NAME_FILTER="dtensor"
    )
    from tfdist.cluster.devices import local_device_names

    local_device_names(4)
    for number, case in enumerate(json.loads(cases)):
        axes = train(case)
        pathlib.Path(folder, f"{number}.json").write_text(json.dumps(collectives(program(dumps), axes)))
        for file in dumps.iterdir():
            file.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
