"""Collectives of the workers through the coordinator: for metrics, evaluations and what a step sends besides gradients."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives, Op, Wire
from tfdist.parameter_server.servers import Servers

_DTYPES = frozenset([tf.float16, tf.float32, tf.float64, tf.int32, tf.int64])


class WorkerCollectives(Collectives):
    """Every call sends this worker's tensors to the coordinator, and returns those of all workers, added in order of rank.

    A worker that is lost before its call takes no part, and ranks are among those that are left.

    Cost: n sent and n N received by each worker, and a round trip.
    """

    wire = Wire(reduces=_DTYPES, gathers=_DTYPES, packed=tf.int32)

    def __init__(self, servers: Servers, worker: int):
        """Initializes the collectives.

        Args:
          servers: the servers.
          worker: rank of this worker in the job.
        """
        self._servers, self._worker = servers, worker

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of workers that have taken part in the last call."""
        return len(self._servers.workers)

    @property
    def rank(self) -> int:
        """See base class."""
        return self._servers.workers.index(self._worker)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""

        def reduced(*arrays: np.ndarray) -> list[np.ndarray]:
            return [_reduced(values, op) for values in zip(*self._servers.gather(arrays), strict=True)]

        return self._call(reduced, tensors, [tensor.shape for tensor in tensors])

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""

        def gathered(*arrays: np.ndarray) -> list[np.ndarray]:
            return [np.concatenate(values) for values in zip(*self._servers.gather(arrays), strict=True)]

        return self._call(gathered, tensors, [tf.TensorShape([None, *tensor.shape[1:]]) for tensor in tensors])

    @staticmethod
    def _call(function: object, tensors: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
        if not tensors:
            return []
        results = tf.numpy_function(function, list(tensors), [tensor.dtype for tensor in tensors])
        return [tf.ensure_shape(result, shape) for result, shape in zip(results, shapes, strict=True)]


def _reduced(values: Sequence[np.ndarray], op: Op) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = np.maximum(total, value) if op == "max" else total + value
    return np.asarray(total / len(values) if op == "mean" else total, values[0].dtype)
