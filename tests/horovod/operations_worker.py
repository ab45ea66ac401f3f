"""One rank of the tests of operations: runs experiments and prints the results as one line of JSON.

python tests/horovod/operations_worker.py [EXPERIMENT...]

The arguments are names of functions below; without any, all experiments of the engine are run.
"""

import contextlib
import functools
import inspect
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd
from tests.horovod.jobs import FLOATS, IN_GRAPHS, MOVED, REDUCED
from tfdist.errors import TfdistError
from tfdist.horovod import object_exchange, process

HAS_HOROVOD = hvd.gloo_built()
# Existing from the start: the first and the last of three ranks, and the one between them.
SETS = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])] if HAS_HOROVOD else None
OPS = (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product)
found: dict[str, Any] = {}


def note(name: str, value: Any) -> None:
    if isinstance(value, tf.IndexedSlices):
        value = [value.values, value.indices]
    found[name] = tf.nest.map_structure(plain, value)


def plain(value: Any) -> Any:
    value = np.asarray(value)
    return (value.astype("float64") if value.dtype.kind not in "iubU" else value).tolist()


def refused(function: Callable[[], Any]) -> str:
    """Returns the error that a call raises, in one line; "" if it raises none."""
    try:
        function()
    except (TfdistError, tf.errors.OpError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def values(dtype: str, rank: int) -> tf.Tensor:
    """Returns 1 + r, 2 + r, 3 + r for rank r; for bool, r == 0, True, False."""
    if dtype == "bool":
        return tf.constant([rank == 0, True, False])
    return tf.cast(tf.range(1, 4) + rank, dtype)


def raised(call: Callable[[], Any]) -> list[str]:
    """Returns the message of the error that a call raises, and its classes; [""] if it raises none."""
    try:
        call()
    except Exception as error:
        return [str(error), *(kind.__name__ for kind in type(error).__mro__)]
    return [""]


def in_a_graph(call: Callable[[], Any]) -> Any:
    """Returns the result of a call in a TensorFlow 1 graph, run by a session that only initializes the variables first."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        result = call()
        session.run([variable.initializer for variable in tf.compat.v1.global_variables()])
        return tf.nest.map_structure(lambda value: np.asarray(value).tolist(), session.run(result))


class InSet:
    """`tfdist.horovod` with operations in a set, whose ranks are numbered from 0; broadcasts are from its last rank."""

    def __init__(self, process_set: Any):
        self._set = process_set

    def __getattr__(self, name: str) -> Any:
        found = getattr(hvd, name)
        if not inspect.isfunction(found) or "process_set" not in inspect.signature(found).parameters:
            return found
        if name.startswith("broadcast"):
            return lambda value, root_rank: found(value, self._set.ranks[-1], process_set=self._set)
        return functools.partial(found, process_set=self._set)


def in_sets(rank: int, size: int) -> None:
    """Experiments in two sets at the same time; over MPI without gradients, for which ranks that share cores poll."""
    outside, own = dict(found), SETS[rank % 2]
    found.clear()
    for experiment in (some_dtypes, shapes, finite_differences)[: 2 if hvd.mpi_enabled() else 3]:
        experiment(own.rank(), own.size(), hvd=InSet(own))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=SETS[0])
    variable = keras.Variable([0.0])
    optimizer.apply([tf.constant([1.0 + rank**2])], [variable])
    note("optimizer", variable)
    other, unknown = SETS[1 - rank % 2], hvd.ProcessSet([0])
    unknown.process_set_id = 10
    for name, wrong in (("of others", other), ("unknown", unknown)):
        found[f"set {name}"] = raised(lambda wrong=wrong: hvd.allreduce(tf.ones([4]), process_set=wrong))
    inside = dict(found)
    found.clear()
    found.update(outside, inside=inside)
    process.engine().group.barrier("in_sets")  # Horovod would not wait long for the larger set


def some_dtypes(
    rank: int,
    size: int,
    chosen: Collection[str] = ("float16", "bfloat16", "int8", "bool"),
    graph: bool = False,
    hvd: Any = hvd,
) -> None:
    where = "graph" if graph else "eager"
    for dtype in (dtype for dtype in chosen if dtype in REDUCED):

        def reduce(x):
            return {op.name: hvd.allreduce(x, op=op) for op in OPS}

        x = values(dtype, rank)
        for op, result in (tf.function(reduce) if graph else reduce)(x).items():
            assert result.dtype == dtype
            note(f"allreduce {op} {dtype} {where}", result)
        if dtype in FLOATS or dtype.startswith("int"):
            note(f"reducescatter {dtype} {where}", hvd.reducescatter(tf.concat([x, x], 0), op=hvd.Sum))
    for dtype in chosen:

        def move(x, rank=rank, size=size):
            own = tf.fill([size], 0) + 1
            return (
                hvd.allgather(x[: rank + 1]),  # uneven
                hvd.broadcast(x, size - 1),
                hvd.alltoall(tf.concat([x] * size, 0)[: 2 * size]),
                *hvd.alltoall(x[:size], splits=own),
            )

        x = values(dtype, rank)
        results = (tf.function(move) if graph else move)(x)
        assert all(result.dtype == dtype for result in results[:4])
        note(f"moves {dtype} {where}", list(results))


def all_dtypes(rank: int, size: int) -> None:
    some_dtypes(rank, size, MOVED)
    some_dtypes(rank, size, IN_GRAPHS, graph=True)


def shapes(rank: int, size: int, hvd: Any = hvd) -> None:
    note("scalar allreduce", hvd.allreduce(tf.constant(1.0 + rank), op=hvd.Sum))
    note("scalar broadcast", hvd.broadcast(tf.constant(1.0 + rank), 1))
    note("empty allreduce", tf.shape(hvd.allreduce(tf.zeros([0, 3]))))
    note("empty allgather", tf.shape(hvd.allgather(tf.zeros([0, 3]))))
    note("one empty allgather", hvd.allgather(tf.fill([rank], rank)))
    note("empty alltoall", tf.shape(hvd.alltoall(tf.zeros([0, 3]))))
    note("uneven alltoall", hvd.alltoall(tf.range(rank + 1) + 10 * rank, splits=[rank + 1] + [0] * (size - 1)))
    note("uneven reducescatter", hvd.reducescatter(tf.range(2 * size + 1), op=hvd.Sum))
    note("few rows reducescatter", hvd.reducescatter(tf.constant([5.0]), op=hvd.Average))
    slices = tf.IndexedSlices(tf.ones([rank + 1, 2]) * (rank + 1), tf.range(rank + 1), tf.constant([4, 2]))
    note("slices sum", tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum)))
    note("slices mean", tf.convert_to_tensor(hvd.allreduce(slices)))
    note("factors", hvd.allreduce(tf.constant([2.0]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0))
    note("fp16", hvd.allreduce(tf.constant([1.0 + 2.0**-12]), op=hvd.Average, compression=hvd.Compression.fp16))
    with warnings.catch_warnings(record=True, action="always") as said:
        note("average=False", hvd.allreduce(tf.constant([1.0]), average=False))
    assert "replaced with `op`" in str(said[-1].message)
    note("name in the second place", hvd.allreduce(tf.constant([1.0]), "a name"))
    note("grouped", hvd.grouped_allreduce([tf.ones([2]), tf.ones([], tf.float64), tf.ones([3])], op=hvd.Sum))
    note("grouped gather", hvd.grouped_allgather([tf.fill([1], rank), tf.fill([rank], 1.5)]))
    note("grouped scatter", hvd.grouped_reducescatter([tf.ones([size]), tf.ones([size, 2])], op=hvd.Sum))
    note(
        "objects",
        [str(hvd.allgather_object({"rank": rank})), str(hvd.broadcast_object([rank, "x"] if rank else None, 1))],
    )
    key = process.engine().object_key
    process.engine().object_key = "another job's" if rank == size - 1 else key
    note("altered object", refused(lambda: hvd.broadcast_object(rank, size - 1)))
    note("altered objects", refused(lambda: hvd.allgather_object(rank)))
    process.engine().object_key = key
    variables = [
        tf.Variable([1.0 + rank]),
        tf.Variable(rank),
        tf.Variable([rank], dtype=tf.uint32),
        tf.Variable(rank == 1),
    ]
    hvd.broadcast_variables(variables, root_rank=1)
    note("variables", [tf.identity(variable) for variable in variables])

    @tf.function
    def constants():
        """TensorFlow's graph optimizer must not run communication of constants."""
        return hvd.allreduce(tf.ones([2]), op=hvd.Sum), hvd.allgather(tf.constant([1])), hvd.barrier()

    note("constants", [constants(), constants()])


def adasum(rank: int, size: int) -> None:
    """Adasum of two vectors that are not orthogonal, in each dtype; with factors; with an unsupported number of ranks."""
    if size != 2:
        found["adasum refused"] = refused(lambda: hvd.allreduce(tf.ones([2]), op=hvd.Adasum))
        return
    found["adasum refused"] = refused(lambda: hvd.allreduce(tf.ones([2], tf.int32), op=hvd.Adasum))
    own = [[3.0, 4.0], [0.0, 2.0]][rank]
    for dtype in FLOATS:
        note(f"adasum {dtype}", hvd.allreduce(tf.constant(own, dtype), op=hvd.Adasum))
    note(
        "adasum in a graph",
        tf.function(lambda x: hvd.allreduce(x, op=hvd.Adasum, prescale_factor=2.0))(tf.constant(own)),
    )


def finite_differences(rank: int, size: int, hvd: Any = hvd) -> None:
    """The gradient of each operation, compared with differences of the sum of all ranks' losses."""
    rng = np.random.default_rng(3 + rank)
    start = rng.uniform(0.5, 1.5, 6)
    weight = tf.constant(rng.uniform(0.5, 1.5, 6 * size))

    def loss_of(y):
        y = tf.reshape(tf.concat([tf.reshape(one, [-1]) for one in tf.nest.flatten(y)], 0), [-1])
        return tf.reduce_sum(tf.sin(y) * weight[: tf.shape(y)[0]])

    operations = {
        "Sum": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0),
        "Average": lambda x: hvd.allreduce(x),
        "Min": lambda x: hvd.allreduce(x, op=hvd.Min, postscale_factor=2.0),
        "Max": lambda x: hvd.allreduce(x, op=hvd.Max),
        "Product": lambda x: hvd.allreduce(x, op=hvd.Product, prescale_factor=0.5),
        "grouped": lambda x: hvd.grouped_allreduce([x[:2], x[2:]], op=hvd.Sum),
        "allgather": lambda x: hvd.allgather(x[: 2 + rank]),
        "grouped_allgather": lambda x: hvd.grouped_allgather([x[:2], x[2 : 3 + rank]]),
        "broadcast": lambda x: hvd.broadcast(x, 1),
        "alltoall": lambda x: hvd.alltoall(x[: size * 2]),
        "splits": lambda x: hvd.alltoall(x[: rank + size], splits=[rank + 1] + [1] * (size - 1))[0],
        "reducescatter": lambda x: hvd.reducescatter(x[: size + 1], op=hvd.Sum, prescale_factor=0.5),
        "reducescatter mean": lambda x: hvd.reducescatter(x),
    }
    for name, operation in operations.items():
        total = tf.function(lambda x, operation=operation: hvd.allreduce(loss_of(operation(x)), op=hvd.Sum))
        numeric = np.zeros((size, 6))
        for other in range(size):
            for i in range(6):
                step = np.zeros(6)
                step[i] = 1e-5 if rank == other else 0.0
                up, down = total(tf.constant(start + step)), total(tf.constant(start - step))
                numeric[other, i] = (up - down) / 2e-5

        def gradient(x, operation=operation):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = loss_of(operation(x))
            return tape.gradient(loss, x)

        for where in (gradient, tf.function(gradient)):
            exact = where(tf.constant(start)).numpy()
            near = float(np.abs(exact).max())
            ratio = float(np.dot(exact, numeric[rank]) / np.dot(numeric[rank], numeric[rank])) if near > 1e-12 else 0.0
            error = float(np.abs(exact - ratio * numeric[rank]).max())
            found.setdefault(f"gradient {name}", []).append([ratio, error, float(np.abs(numeric[rank]).max())])


def process_sets(rank: int, size: int) -> None:
    """A set that is added later."""
    pair = hvd.add_process_set([1, size - 1])
    note("set", [pair.size(), pair.included()])
    if pair.included():
        x = tf.constant([1.0 + rank])
        note("set allreduce", hvd.allreduce(x, op=hvd.Sum, process_set=pair))
        note("set root", refused(lambda: hvd.broadcast(x, 0, process_set=pair)))
    note("set sizes", [f() for f in (hvd.size_op, hvd.process_set_included_op)])
    note("sizes of a set", [f(pair.process_set_id) for f in (hvd.size_op, hvd.process_set_included_op)])
    weights = tf.Variable([1.0])
    for name, op in (("", hvd.Average), (" of maxima", hvd.Max)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights * (rank + 1.0))
        tape = hvd.DistributedGradientTape(tape, op=op, process_set=pair)
        note(f"set gradient{name}", tape.gradient(loss, [weights]))
    found["set twice"] = [raised(lambda r=r: hvd.add_process_set(r))[-4] for r in ([2, 1], range(size))]
    hvd.barrier()
    removed = [hvd.remove_process_set(pair), pair.process_set_id is None, hvd.remove_process_set(pair)]
    again = hvd.add_process_set(pair)
    note("set removed", [*removed, again is pair, hvd.remove_process_set(pair)])
    note("set of all removed", hvd.remove_process_set(hvd.global_process_set))


@contextlib.contextmanager
def on_the_way(change: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Lets what the ranks receive as signed objects be changed, as by someone who reaches the engine's connections."""

    def changing(move: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def moved(tensor: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
            received = move(tensor, *args, **kwargs)
            return change(received) if tensor.dtype == tf.uint8 else received

        return moved

    changed = mock.patch.multiple(object_exchange, broadcast=changing(hvd.broadcast), allgather=changing(hvd.allgather))
    with changed, mock.patch.object(object_exchange, "allgather", changing(hvd.allgather)):
        yield


def earlier_objects(rank: int, size: int) -> None:
    seen: list[tf.Tensor] = []  # the nonces, and an object
    with on_the_way(lambda received: seen.append(received) or received):
        note("object", hvd.broadcast_object("old", name="object"))
    with on_the_way(lambda received: seen[1]):
        found["earlier object"] = refused(lambda: hvd.broadcast_object("new", name="object"))
        found["object of another name"] = refused(lambda: hvd.broadcast_object("new", name="another"))
    with on_the_way(lambda received: tf.reshape(tf.reshape(received, [size, -1])[::-1], [-1])):
        found["object of another rank"] = refused(lambda: hvd.allgather_object(rank, name="rank"))
    if hvd.gloo_built():
        hvd.shutdown()
        hvd.init()
        again = iter(seen)
        with on_the_way(lambda received: next(again)):
            found["object of an earlier start"] = refused(lambda: hvd.broadcast_object("new", name="object"))
        hvd.shutdown()
        hvd.init()
    note("object", hvd.broadcast_object("next", name="object"))


def joined(rank: int, size: int) -> None:
    if rank:
        note("joined", hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="joined"))
    hvd.join()


def mismatches(rank: int, size: int) -> None:
    odd = rank == size - 1
    kinds: dict[str, Callable[[], Any]] = {
        "dtype": lambda: hvd.allreduce(tf.ones([2], tf.float64 if odd else tf.float32), name="dtype"),
        "shape": lambda: hvd.allreduce(tf.ones([3 if odd else 2]), name="shape"),
        "op": lambda: hvd.allreduce(tf.ones([2]), op=hvd.Max if odd else hvd.Sum, name="op"),
        "operation": lambda: (hvd.allgather if odd else hvd.allreduce)(tf.ones([2]), name="operation"),
        "root": lambda: hvd.broadcast(tf.ones([2]), int(odd), name="root"),
        "row": lambda: hvd.allgather(tf.ones([2, 3 if odd else 2]), name="row"),
        "factor": lambda: hvd.allreduce(tf.ones([2]), op=hvd.Sum, prescale_factor=1.0 + odd, name="factor"),
        "name": lambda: hvd.allreduce(tf.ones([2]), name="this" if odd else "that"),
        "alltoall": lambda: hvd.alltoall(tf.ones([size, 3 if odd else 2]), name="alltoall"),
        "scattered shape": lambda: hvd.reducescatter(tf.ones([size + odd]), name="scattered_shape"),
        "scattered row": lambda: hvd.reducescatter(tf.ones([size, 2 + odd]), name="scattered_row"),
        "scattered rank": lambda: hvd.reducescatter(tf.ones([size, 2] if odd else [size]), name="scattered_rank"),
        "scattered op": lambda: hvd.reducescatter(
            tf.ones([size]), op=hvd.Sum if odd else hvd.Average, name="scattered_op"
        ),
        "scattered factor": lambda: hvd.reducescatter(
            tf.ones([size]), prescale_factor=1.0 + odd, name="scattered_factor"
        ),
        "scattered dtype": lambda: hvd.reducescatter(
            tf.ones([size], tf.float64 if odd else tf.float32), name="scattered_dt"
        ),
    }
    if hvd.gloo_built():  # Horovod does not compare factors, and another name is another call
        kinds = {name: call for name, call in kinds.items() if name not in ("factor", "name")}
    for name, call in kinds.items():
        found[f"mismatch {name} eager"] = refused(call)
        found[f"mismatch {name} graph"] = refused(tf.function(call, autograph=False))


def skipped(rank: int, size: int) -> None:
    """The last rank omits a call; must be the last experiment, because it shuts Horovod down."""
    begun = time.monotonic()
    if rank < size - 1:
        found["skipped"] = refused(lambda: hvd.allreduce(tf.ones([2]), name="the_one_that_is_left_out"))
    else:
        found["skipped"] = refused(lambda: hvd.allreduce(tf.ones([2]), name="what_comes_next"))
    found["skipped seconds"] = time.monotonic() - begun


def left_out(rank: int, size: int) -> None:
    """Rank 1 omits a call."""
    note("after mismatches", hvd.allreduce(tf.ones([2]), op=hvd.Sum))
    begun = time.monotonic()
    if rank == 0:
        found["left out"] = refused(lambda: hvd.allreduce(tf.ones([2]), name="the_one_that_is_left_out"))
    else:
        time.sleep(10)
        found["left out"] = refused(lambda: hvd.allreduce(tf.ones([2]), name="what_comes_next"))
    found["left out seconds"] = time.monotonic() - begun


def slices_and_scales(rank: int, size: int) -> None:
    def gathered(digits: tf.Tensor, fours: tf.Tensor) -> list[tf.Tensor]:
        total = hvd.allreduce(tf.IndexedSlices(digits, [rank], [size]), op=hvd.Sum).values
        return [total, hvd.allreduce(tf.IndexedSlices(fours, [rank], [size])).values]

    given = tf.constant([2**53 + 1 + rank], tf.int64), tf.constant([4], tf.int64)
    for where, call in (("eager", gathered), ("graph", tf.function(gathered))):
        found[f"integer slices {where}"] = [[x.dtype.name, x.numpy().tolist()] for x in call(*given)]
    whole = tf.constant([1 + rank] + [3] * (size - 1))
    scaled = [
        hvd.reducescatter(whole, op=hvd.Sum, prescale_factor=0.5),
        hvd.reducescatter(tf.fill([size], tf.constant(3, tf.float16)), op=hvd.Sum, prescale_factor=0.3),
        hvd.reducescatter(whole, prescale_factor=0.5, postscale_factor=3.0),
    ]
    found["scaled scatter"] = [x.numpy().tolist() for x in scaled]


def errors(rank: int, size: int) -> None:
    one, scalar = tf.ones([1]), tf.constant(1.0)
    slices = tf.IndexedSlices(one, [0], [1])
    # With the classes of Horovod 0.28.1 under horovodrun -np 2, except for calls that end the process there.
    calls: dict[str, tuple[str, Callable[[], Any]]] = {
        "allgather of a scalar": ("FailedPreconditionError", lambda: hvd.allgather(scalar)),
        "reducescatter of a scalar": ("InvalidArgumentError", lambda: hvd.reducescatter(scalar)),
        "alltoall of a scalar": ("InvalidArgumentError", lambda: hvd.alltoall(scalar)),
        "a root that is no rank": ("InvalidArgumentError", lambda: hvd.broadcast(one, size)),
        "allreduce of bool": ("InvalidArgumentError", lambda: hvd.allreduce(tf.constant([True]))),
        "allgather of strings": ("InvalidArgumentError", lambda: hvd.allgather(tf.constant(["a"]))),
        "rows that cannot be divided": ("InvalidArgumentError", lambda: hvd.alltoall(tf.ones([size + 1]))),
        "splits of more rows": ("InvalidArgumentError", lambda: hvd.alltoall(one, splits=[1] * size)),
        "maximum of slices": ("NotImplementedError", lambda: hvd.allreduce(slices, op=hvd.Max)),
        "slices and a factor before": (
            "NotImplementedError",
            lambda: hvd.allreduce(slices, op=hvd.Sum, prescale_factor=2.0),
        ),
        "op and average": ("ValueError", lambda: hvd.allreduce(one, op=hvd.Sum, average=True)),
        "an operation that is none": ("ValueError", lambda: hvd.allreduce(one, op=17)),
        "global variables": ("RuntimeError", lambda: hvd.broadcast_global_variables(0)),
        "an object in a graph of TensorFlow 1": (
            "RuntimeError",
            lambda: in_a_graph(lambda: hvd.broadcast_object(rank)),
        ),
        "a session": ("RuntimeError", lambda: hvd.broadcast_object(rank, session="session")),
        "broadcast_object_fn": ("RuntimeError", lambda: hvd.elastic.broadcast_object_fn()),
        "a state with a session": (
            "RuntimeError",
            lambda: hvd.elastic.TensorFlowState([tf.Variable(1.0)], session="session"),
        ),
        "a state of global variables": ("RuntimeError", lambda: hvd.elastic.TensorFlowState()),
    }
    found["errors"] = [[name, expected, *raised(call)] for name, (expected, call) in calls.items()]


def graphs(rank: int, size: int) -> None:
    variable = tf.Variable(1.0 + rank)

    @tf.function
    def broadcast() -> tf.Tensor:
        done = hvd.broadcast_variables([variable], root_rank=1)
        with tf.control_dependencies([done]):
            return variable + 0.0

    found["broadcast in tf.function"] = [
        float(broadcast()),
        float(variable),
        hvd.broadcast_variables([variable], 1) is None,
    ]

    def in_session() -> Any:
        own = tf.compat.v1.Variable([1.0 + rank])
        with tf.control_dependencies([hvd.broadcast_variables([own], root_rank=1)]):
            return own.read_value()

    def in_place() -> Any:
        return hvd.broadcast_([tf.compat.v1.Variable([1.0 + rank]), tf.compat.v1.Variable([2 + rank])], 1)

    def operations() -> Any:
        own = tf.constant([1.0 + rank])
        return [hvd.allreduce(own, op=hvd.Sum), hvd.allgather(own), hvd.broadcast(own, hvd.size() - 1)]

    for name, call in (("broadcast", in_session), ("broadcast_", in_place), ("operations", operations)):
        found[f"{name} in a session"] = in_a_graph(call) if HAS_HOROVOD else refused(lambda call=call: in_a_graph(call))


def horovod_required_error(rank: int, size: int) -> None:
    found["refused"] = [
        refused(lambda: hvd.join()),
        refused(lambda: hvd.add_process_set([0])),
        refused(lambda: hvd.ProcessSet([0])),
        refused(lambda: hvd.elastic.ObjectState(batch=0)),
        refused(lambda: hvd.elastic.run(print)),
        refused(lambda: hvd.start_timeline("file")),
    ]


GRADIENTS_AND_ERRORS = (finite_differences, slices_and_scales, errors, graphs)
EXPERIMENTS = (earlier_objects, adasum, all_dtypes, shapes, *GRADIENTS_AND_ERRORS)
WITH_HOROVOD = (in_sets, *EXPERIMENTS, process_sets, joined, mismatches, skipped)
WITHOUT_HOROVOD = (*EXPERIMENTS, horovod_required_error, mismatches, left_out)


def refused_starts() -> list[str]:
    """Returns the errors of `init` for process sets from which Horovod would not recover; in the second, the ranks differ."""
    differing = [hvd.ProcessSet([0])] if json.loads(os.environ["TF_CONFIG"])["task"]["index"] else []
    return [
        raised(lambda given=given: hvd.init(process_sets=given))[0] for given in ([hvd.ProcessSet([0, 7])], differing)
    ]


def main() -> None:
    found["comm"] = refused(lambda: hvd.init(comm=[0, 1]))
    found["refused starts"] = refused_starts() if HAS_HOROVOD else []
    hvd.init(process_sets=SETS)
    rank, size = hvd.rank(), hvd.size()
    who = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
    built = ("gloo_built", "mpi_built", "nccl_built", "mpi_threads_supported", "mpi_enabled")
    found["who"], found["built"] = ([int(getattr(hvd, name)()) for name in names] for names in (who, built))
    experiments = WITH_HOROVOD if HAS_HOROVOD else WITHOUT_HOROVOD
    for experiment in [globals()[name] for name in sys.argv[1:]] or experiments:
        experiment(rank, size)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
