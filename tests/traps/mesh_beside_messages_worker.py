"""A process with a mesh of its own two devices that also exchanges messages; prints what each did as one line of JSON.

python tests/traps/mesh_beside_messages_worker.py STRATEGY own|shared
"""

import json
import sys

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfdist
from tfdist.cluster.devices import local_device_names

ROWS, INNER, COLUMNS = 4, 8, 6


def mesh_of(strategy: str, kind: str, rank: int) -> dtensor.Mesh:
    """Returns a mesh of this process's devices, or one of all processes' of which this process has a row."""
    job, task = ("worker", rank) if strategy == "multiworker" else ("localhost", 0)
    devices = [tf.DeviceSpec(job=job, replica=0, task=task, device_type="CPU", device_index=i) for i in range(2)]
    if kind == "own":
        return dtensor.Mesh(["model"], np.arange(2), [0, 1], devices)
    return dtensor.Mesh(["stage", "model"], np.arange(4).reshape(2, 2), [2 * rank, 2 * rank + 1], devices)


def program(mesh: dtensor.Mesh, rank: int) -> tf.Tensor:
    """Returns an ordinary tensor, a product over a sharded dim; ranks run different programs."""
    x, kernel = np.full([ROWS, INNER], rank + 1.0), np.ones([INNER, COLUMNS])
    by_rows = dtensor.Layout(["model", dtensor.UNSHARDED], mesh)
    by_columns = dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)
    variable = dtensor.DVariable(dtensor.pack(np.split(kernel, 2), by_rows))

    @tf.function(autograph=False)
    def product(x: tf.Tensor) -> tf.Tensor:
        y = x @ variable
        if rank:
            y += tf.reduce_sum(variable)
        return dtensor.relayout(y, dtensor.Layout.replicated(mesh, 2))

    return dtensor.unpack(product(dtensor.pack(np.split(x, 2, 1), by_columns)))[0]


def exchange(strategy: tfdist.Strategy, rank: int, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that the other rank has passed to this function."""
    collectives = strategy.collectives

    def message(tensor: tf.Tensor) -> tf.Tensor:
        collectives.send([tensor], 1 - rank, tag="activation")
        return collectives.receive([tf.TensorSpec([ROWS, COLUMNS], tf.float64)], 1 - rank, tag="activation")[0]

    return strategy.local(tf.function(lambda x: strategy.run(message, x), autograph=False)(tensor))[0]


def main(name: str, kind: str) -> None:
    """Runs a program of the mesh, exchanges its results, and runs another."""
    local_device_names(2)
    if kind == "shared" and name == "multiworker":
        tf.distribute.MultiWorkerMirroredStrategy._collective_key_base = 2**28  # noqa: SLF001
    strategy = tfdist.load_strategy(name, start_timeout_seconds=60)
    rank = strategy.group.rank
    mesh = mesh_of(name, kind, rank)
    found: dict[str, object] = {"error": ""}
    try:
        mine = program(mesh, rank)
        received = exchange(strategy, rank, mine)
        again = program(mesh, rank)
        found |= {key: float(x[0, 0]) for key, x in {"mine": mine, "received": received, "again": again}.items()}
        strategy.group.barrier("done")
    except tf.errors.OpError as error:
        found["error"] = str(error)
    print(f"\n{json.dumps(found)}", flush=True)
    if not found["error"]:
        strategy.group.leave()
        strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
