"""Uses groups of ranks and messages between two ranks.

Returns by name what this rank has computed: eagerly, and in a step that runs twice.
"""

import contextlib
import pathlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tfdist
from tfdist import collectives
from tfdist.errors import InputError

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "bool")


def values(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal((8, 3)).astype("float32")


def work(strategy: tfdist.Strategy, directory: pathlib.Path, *groups: str) -> list[dict[str, np.ndarray]]:
    c, rank, n = strategy.collectives, strategy.cluster.rank, strategy.replicas
    own = [int(digit) for digit in next(text for text in groups if str(rank) in text)]
    x = tf.constant(values(rank))

    def operations() -> dict[str, tf.Tensor]:
        group = c.group(own)
        found = {
            "rank": tf.identity(group.rank),
            "sum": group.all_reduce([x, x[0, 0]], name="operation")[0],
            "scalar": group.all_reduce([x, x[0, 0]], name="scalar")[1],
            "constant": group.all_reduce([tf.ones([3])], name="constant")[0],
            "max": group.all_reduce([x], "max", name="max")[0],
            "mean": group.all_reduce([x], "mean", name="mean")[0],
            "gather": group.all_gather([x[:rank], x], name="operation_gather")[0],
            "scatter": group.reduce_scatter([x], name="scatter")[0],
            "exchange": group.all_to_all([x], name="exchange")[0],
            "uneven": group.all_to_all([x[: rank + 1]], name="uneven", splits=_splits(rank, group.size))[0],
            "root": group.broadcast([x, x[0, 0]], group.size - 1, name="root")[0],
            "barrier": tf.identity(tf.convert_to_tensor(group.barrier(name="barrier"))),
            "everyone": c.all_reduce([x], name="operation")[0],
        }
        for first in range(n):  # pairs that overlap, each with the same names
            if rank in (first, first + 1) and first + 1 < n:
                pair = c.group([first, first + 1])
                found[f"pair{first}"] = pair.all_reduce([x], name="pair")[0]
        return found

    def gradients() -> dict[str, tf.Tensor]:
        """Returns gradients of the sum of (rank + 1) * operation(x), or errors."""
        group = c.group(own)
        calls = {
            "all_reduce": lambda y: collectives.all_reduce(group, y, name="d_sum"),
            "all_gather": lambda y: collectives.all_gather(group, y, name="d_gather"),
            "sum": lambda y: group.all_reduce([y], name="d_sum_only")[0],
            "gather": lambda y: group.all_gather([y], name="d_gather_only")[0],
            "root": lambda y: group.broadcast([y], group.size - 1, name="d_root_only")[0],
            "max of all": lambda y: c.all_reduce([y], "max", name="d_max_of_all")[0],
            "gather of all": lambda y: c.all_gather([y], name="d_gather_of_all")[0],
            "root of all": lambda y: c.broadcast([y], name="d_root_of_all")[0],
        }
        return {name: _gradient(call, x, rank) for name, call in calls.items()}

    def refused() -> dict[str, tf.Tensor]:
        """Returns the error of a group that was not declared, and the size of one that needs no declaration."""
        try:
            c.group([0, 1, 2] if n > 3 and rank < 3 else [rank]).all_reduce([x], name="refused")
        except InputError as error:
            return {"error": tf.constant(str(error))}
        return {"error": tf.constant("")}

    def ring(step: int) -> dict[str, tf.Tensor]:
        to, source = (rank + step) % n, (rank - step) % n
        specs = [tf.TensorSpec([8, 3], tf.float32), tf.TensorSpec([], tf.float32)]
        if not tf.executing_eagerly():  # where no call blocks
            received = c.receive(specs, source, tag="ring")
            c.send([x, x[0, 0]], to, tag="ring")
        elif rank % 2:
            received = c.receive(specs, source, tag="ring")
            c.send([x, x[0, 0]], to, tag="ring")
        else:
            c.send([x, x[0, 0]], to, tag="ring")
            received = c.receive(specs, source, tag="ring")
        return {"message": received[0], "scalar": received[1]}

    def both_neighbors() -> dict[str, tf.Tensor]:
        """Messages with one tag to two ranks, in a name scope on some ranks only."""
        neighbors = sorted({(rank - 1) % n, (rank + 1) % n})
        if tf.executing_eagerly():
            return {}
        with tf.name_scope("even") if rank % 2 == 0 else contextlib.nullcontext():
            for other in neighbors:
                c.send([x], other, tag="one/tag")
        specs = [tf.TensorSpec([8, 3], tf.float32)]
        return {f"from{other}": c.receive(specs, other, tag="one/tag")[0] for other in neighbors}

    def unused() -> dict[str, tf.Tensor]:
        """Messages of equal constants, of which one is unused."""
        specs = [tf.TensorSpec([3], tf.float32)]
        if rank == 0:
            for tag in ("a", "b"):
                c.send([tf.zeros([3])], 1, tag=tag)
        elif rank == 1:
            tags = ("a", "b") if tf.executing_eagerly() else ("b", "a")  # eagerly, a call may wait for the other rank
            received = {name: c.receive(specs, 0, tag=name)[0] for name in tags}
            return {"a": received["a"]}
        return {}

    def dtypes() -> dict[str, tf.Tensor]:
        carried = [dtype for dtype in DTYPES if tf.as_dtype(dtype) in c.dtypes.sendable]
        if rank == 0:
            c.send([tf.cast(tf.range(5), dtype) for dtype in carried], 1, tag="dtypes")
        elif rank == 1:
            specs = [tf.TensorSpec([5], dtype) for dtype in carried]
            return dict(zip(carried, c.receive(specs, 0, tag="dtypes"), strict=True))
        return {}

    def loop() -> dict[str, tf.Tensor]:
        def turn(i: tf.Tensor, y: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            c.send([y], (rank + 1) % n, tag="turn")
            [z] = c.receive([tf.TensorSpec([8, 3], tf.float32)], (rank - 1) % n, tag="turn")
            [mean] = c.group(own).all_reduce([z], "mean", name="turn")
            return i + 1, z, sums + mean

        start = (tf.constant(0), x, tf.zeros_like(x))
        _, last, sums = tf.while_loop(lambda i, *_: i < 5, turn, start, parallel_iterations=1)
        return {"last": last, "sums": sums}

    functions = {
        "operations": operations,
        "gradients": gradients,
        "refused": refused,
        "forward": lambda: ring(1),
        "backward": lambda: ring(-1),
        "both_neighbors": both_neighbors,
        "unused": unused,
        "dtypes": dtypes,
    }
    results = [{name: strategy.run(function) for name, function in functions.items()}]
    functions["loop"] = loop
    compiled = {
        name: tf.function(lambda function=function: strategy.run(function), autograph=False)
        for name, function in functions.items()
    }
    results += [{name: function() for name, function in compiled.items()} for _ in range(2)]
    return [tf.nest.map_structure(lambda tensor: strategy.local(tensor)[0].numpy(), result) for result in results]


def _gradient(call: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor, rank: int) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = (rank + 1) * tf.reduce_sum(call(x))
    try:
        return tape.gradient(loss, x, unconnected_gradients="zero")
    except LookupError as error:
        return tf.constant(str(error))


def _splits(rank: int, size: int) -> tf.Tensor:
    """Returns splits of rank + 1 rows: all for the last rank."""
    return tf.constant([0] * (size - 1) + [rank + 1])
