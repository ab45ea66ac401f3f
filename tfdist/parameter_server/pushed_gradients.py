"""Compresses the gradients that workers push to servers.

A worker encodes its gradients with a codec and error feedback, as if it were the only replica, and pushes the code. Servers
decode and sum the codes of all shares, as each replica does with other strategies.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives, OneReplica
from tfdist.config.rules import parse_rules
from tfdist.config.staleness import PUSHED_METHODS
from tfdist.coordination.calls import ALIGNMENT
from tfdist.distribution.strategy import State
from tfdist.gradients import ErrorFeedback, Reducer, ReductionResult
from tfdist.gradients.compression import EXACT, CodecReducer, create
from tfdist.gradients.reducer import Tensors, split_at, tensor_specs


def as_tensor(array: np.ndarray) -> tf.Tensor:
    """Returns the tensor of a received array, which shares its memory if NumPy knows the dtype."""
    is_known = array.dtype.isbuiltin == 1 and array.ctypes.data % ALIGNMENT == 0
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__()) if is_known else tf.constant(array)


def create_push_reducer(methods: str) -> Reducer:
    """Creates the reducer of a worker for one of `PUSHED_METHODS`, or for two methods separated by |."""
    specs = parse_rules(methods)[0].methods
    assert all(spec.name in PUSHED_METHODS for spec in specs)  # servers run no code that a message names
    return create(specs)


class _Messages(OneReplica):
    """Collectives of one replica that record the tensors it sends.

    Attributes:
      rank: rank of the worker, from which random numbers are derived.
      payloads: the gathered tensors.
    """

    def __init__(self, rank: int | tf.Variable):
        self.rank = rank
        self.payloads: list[tf.Tensor] = []

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        self.payloads += tensors
        return list(tensors)


class PushReducer(Reducer):
    """Encodes the gradients of a worker. Its totals are these gradients as servers decode them before they sum them.

    Attributes:
      methods: compression method of each tensor.
      payloads: in the latest trace, the payload of each tensor to push: its code, or the tensor itself if uncompressed.
    """

    def __init__(self, methods: Sequence[str], worker: int | tf.Variable = 0, *, agrees: bool = False):
        """Initializes the reducer of a worker, given its rank. The method `EXACT` means no compression.

        With `agrees`, a step is finite only if the shares of all workers are. Cost: a round trip to the coordinator.
        """
        self.methods, self._worker, self._agrees = list(methods), worker, agrees
        self._reducers = [None if text == EXACT else create_push_reducer(text) for text in methods]
        self.payloads: list[tf.Tensor] = []

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class. Each worker has its own errors and numbers of random draws."""
        reducers = zip(specs, self._reducers, strict=True)
        states = [state for spec, reducer in reducers if reducer for state in reducer.state([spec])]
        return [dataclasses.replace(state, per_replica=True) for state in states]

    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        self.payloads, result, remaining = [], ReductionResult([], [], [], []), list(state)
        for i, (tensor, reducer) in enumerate(zip(tensors, self._reducers, strict=True)):
            messages, reduction = _Messages(self._worker), ReductionResult([tensor], [tensor], [], [tensor])
            if reducer:
                tensor_state, remaining = split_at(remaining, len(reducer.state(tensor_specs([tensor]))))
                reduction = reducer.reduce([tensor], tensor_state, messages, name=f"{name}/{i}")
            self.payloads += messages.payloads or [tensor]
            for values, tensor_values in zip(result, reduction, strict=True):
                values += tensor_values
        if self._agrees:
            flag = tf.where(result.all_finite(), [0.0], [float("nan")])
            result = result._replace(witnesses=collectives.all_reduce([flag], name=f"{name}/finite"))
        return result


@functools.cache
def _decoder(method: str) -> CodecReducer:
    reducer = create_push_reducer(method)
    reducer = reducer.inner if isinstance(reducer, ErrorFeedback) else reducer
    assert isinstance(reducer, CodecReducer)
    return reducer


def sum_payloads(payloads: Sequence[np.ndarray], method: str, variable: tf.Variable) -> tf.Tensor:
    """Decodes and sums gradients of a variable, given their method and the payload of each share; see `PushReducer`."""
    if method == EXACT:
        return functools.reduce(operator.add, map(as_tensor, payloads))
    codes, size = tf.constant(np.concatenate(payloads)), variable.shape.num_elements()
    total, _ = _decoder(method).coder.sum(codes, len(payloads), size, OneReplica.dtypes)
    return tf.cast(tf.reshape(total, variable.shape), variable.dtype)
