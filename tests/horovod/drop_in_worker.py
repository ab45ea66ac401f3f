"""Experiments on Horovod's error classes, precision and graphs, on which programs rely; see operations_worker.py."""

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd
from tfdist.errors import InputError

HAS_HOROVOD = hvd.gloo_built()


def refused_starts() -> list[str]:
    """Returns the errors of `init` for process sets from which Horovod would not recover; in the last, the ranks differ."""
    wrong = [[hvd.ProcessSet([0, 7])], [hvd.ProcessSet([0]), hvd.ProcessSet([0])], [hvd.ProcessSet([0, 1, 2])], "set"]
    differing = [hvd.ProcessSet([0])] if json.loads(os.environ["TF_CONFIG"])["task"]["index"] else []
    return [raised(lambda given=given: hvd.init(process_sets=given))[0] for given in (*wrong, differing)]


def raised(call: Callable[[], Any]) -> list[str]:
    """Returns the message of the error that a call raises, and its classes; [""] if it raises none."""
    try:
        call()
    except Exception as error:
        return [str(error), *(kind.__name__ for kind in type(error).__mro__)]
    return [""]


def or_refused(call: Callable[[], Any]) -> Any:
    """Returns the result of a call, or the text of its `InputError`."""
    try:
        return call()
    except InputError as error:
        return f"{type(error).__name__}: {error}"


def in_a_graph(call: Callable[[], Any]) -> Any:
    """Returns the result of a call in a TensorFlow 1 graph, run by a session that only initializes the variables first."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        result = call()
        session.run([variable.initializer for variable in tf.compat.v1.global_variables()])
        return tf.nest.map_structure(lambda value: np.asarray(value).tolist(), session.run(result))


def slices_and_scales(rank: int, size: int, found: dict[str, Any]) -> None:
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


def errors(rank: int, size: int, found: dict[str, Any]) -> None:
    one, scalar = tf.ones([1]), tf.constant(1.0)
    slices = tf.IndexedSlices(one, [0], [1])
    calls: dict[str, Callable[[], Any]] = {
        "allgather of a scalar": lambda: hvd.allgather(scalar),
        "reducescatter of a scalar": lambda: hvd.reducescatter(scalar),
        "alltoall of a scalar": lambda: hvd.alltoall(scalar),
        "a root that is no rank": lambda: hvd.broadcast(one, size),
        "a root below 0": lambda: hvd.broadcast(one, -1),
        "allreduce of bool": lambda: hvd.allreduce(tf.constant([True])),
        "allgather of strings": lambda: hvd.allgather(tf.constant(["a"])),
        "rows that cannot be divided": lambda: hvd.alltoall(tf.ones([size + 1])),
        "splits of more rows": lambda: hvd.alltoall(one, splits=[1] * size),
        "maximum of slices": lambda: hvd.allreduce(slices, op=hvd.Max),
        "Adasum of slices": lambda: hvd.allreduce(slices, op=hvd.Adasum),
        "slices and a factor before": lambda: hvd.allreduce(slices, op=hvd.Sum, prescale_factor=2.0),
        "slices and a factor behind": lambda: hvd.grouped_allreduce([slices], postscale_factor=2.0),
        "op and average": lambda: hvd.allreduce(one, op=hvd.Sum, average=True),
        "an operation that is none": lambda: hvd.allreduce(one, op=17),
        "global variables": lambda: hvd.broadcast_global_variables(0),
        "an object in a graph of TensorFlow 1": lambda: in_a_graph(lambda: hvd.broadcast_object(rank)),
        "objects in a graph of TensorFlow 1": lambda: in_a_graph(lambda: hvd.allgather_object(rank)),
        "an object in tf.function": lambda: tf.function(lambda: hvd.broadcast_object(rank), autograph=False)(),
        "a session": lambda: hvd.broadcast_object(rank, session="session"),
        "broadcast_object_fn": lambda: hvd.elastic.broadcast_object_fn(),
        "a state with a session": lambda: hvd.elastic.TensorFlowState([tf.Variable(1.0)], session="session"),
        "a state of global variables": lambda: hvd.elastic.TensorFlowState(),
    }
    for name, call in calls.items():
        found[f"error {name}"] = raised(call)


def graphs(rank: int, found: dict[str, Any]) -> None:
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

    found["broadcast in a session"] = or_refused(lambda: in_a_graph(in_session))

    def in_place() -> Any:
        return hvd.broadcast_([tf.compat.v1.Variable([1.0 + rank]), tf.compat.v1.Variable([2 + rank])], 1)

    def operations() -> Any:
        own = tf.constant([1.0 + rank])
        return [hvd.allreduce(own, op=hvd.Sum), hvd.allgather(own), hvd.broadcast(own, hvd.size() - 1)]

    found["broadcast_ in a session"] = or_refused(lambda: in_a_graph(in_place))
    found["in a session"] = or_refused(lambda: in_a_graph(operations))
