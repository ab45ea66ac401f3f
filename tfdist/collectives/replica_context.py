"""Collectives of tf.distribute, through `tf.distribute.get_replica_context()`; gradients of its operations are refused."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op, Wire


def without_gradient(tensors: Sequence[tf.Tensor], operation: str) -> list[tf.Tensor]:
    """Returns the same tensors, which raise `LookupError` when a gradient passes through them.

    Args:
      tensors: what a replica passes to an operation, or its results, if TensorFlow has an error of its own for the operation.
      operation: name of the operation, for the error.
    """
    message = (
        f"{operation} of these Collectives does not differentiate. Call tfdist.collectives.all_reduce(collectives, tensor, "
        "name=...) or tfdist.collectives.all_gather, which do."
    )
    inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
    return [tf.raw_ops.PreventGradient(input=x, message=message) if x.dtype.is_floating else x for x in inputs]


# Creates the collectives of some of a strategy's replicas, given these and the rank of the calling one.
MakeGroup = Callable[[tuple[int, ...], int], Collectives]


class ReplicaContextCollectives(Collectives):
    """The collectives of any tf.distribute strategy; usable inside `strategy.run` only.

    The engine supports sum and mean, but neither max nor reduce-scatter nor all-to-all: a maximum is gathered, n (N -
    1) bytes sent, and computed locally; the others are composed as in the contract. Between processes, an all-gather of
    different numbers of rows costs as much as if every replica had the largest number.
    """

    wire = Wire(
        reduces=frozenset([tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64]),
        gathers=frozenset([tf.float16, tf.float32, tf.float64, tf.int32, tf.int64]),
        packed=tf.int32,
        only_sends=frozenset([tf.bool]),
    )

    def __init__(
        self,
        size: int,
        options: tf.distribute.experimental.CommunicationOptions | None = None,
        make_group: MakeGroup | None = None,
    ):
        """Initializes the collectives.

        Args:
          size: number of replicas.
          options: communication options, passed to the engine.
          make_group: creates the collectives of some replicas, which tf.distribute has not; None if the engine has none.
        """
        self.size = size
        self._options = options
        self._make_group = make_group

    @property
    def rank(self) -> tf.Tensor | int:
        """See base class."""
        return _context().replica_id_in_sync_group

    def group(self, ranks: Sequence[int]) -> Collectives:
        """See base class."""
        if self._make_group is None or tuple(ranks) == tuple(range(self.size)):
            return super().group(ranks)
        return self._make_group(self.checked(ranks), self.static_rank)

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        """See base class."""
        if self._make_group is None:
            return super().send(tensors, to, tag=tag)
        self.check_message(tensors, to, tag)
        return self._make_group(tuple(range(self.size)), self.static_rank).send(tensors, to, tag=tag)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """See base class."""
        if self._make_group is None:
            return super().receive(specs, source, tag=tag)
        self.check_message(specs, source, tag)
        return self._make_group(tuple(range(self.size)), self.static_rank).receive(specs, source, tag=tag)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        if op == "max":
            gathered = self.stack(tensors, name=name)
            return [tf.reduce_max(whole, axis=0) for whole in gathered]
        by_dtype: dict[tf.DType, list[int]] = {}  # one vector per call between processes
        for number, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(number)
        reduced: dict[int, tf.Tensor] = {}
        for numbers in by_dtype.values():
            sent = [tensors[number] for number in numbers]
            results = _context().all_reduce(op.upper(), _detached(sent), self._options)
            reduced |= zip(numbers, without_gradient(_linked(results, sent), "all_reduce"), strict=True)
        return [reduced[number] for number in range(len(tensors))]

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        results = _context().all_gather(_detached(tensors), 0, self._options)
        return without_gradient(_linked(results, tensors), "all_gather")

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """See base class. With splits, replica 0 sends itself one more row: TensorFlow crashes on empty gathers."""
        if splits is None:
            return super().all_to_all(tensors, name=name)
        extra_rows = tf.cast(tf.equal(self.rank, 0), tf.int32)
        padded = [tf.pad(tensor, [[extra_rows, 0], *[[0, 0]] * (tensor.shape.rank - 1)]) for tensor in tensors]
        sent = self._fitting(splits, tensors, name) + extra_rows * tf.one_hot(0, self.size, dtype=tf.int32)
        return [rows[extra_rows:] for rows in super().all_to_all(padded, name=name, splits=sent)]


def _detached(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors to pass to the engine, which searches the graph behind its results for variables.

    Within one process these depend on the models of all replicas: the search would take seconds in a large model. The engine
    also rejects an argument of the function ("destinations can not be empty"), which these are not.
    """
    return [tf.stop_gradient(tensor) for tensor in tensors]


def _linked(results: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the results, with `tensors` behind them in the graph, so that a gradient is refused and not zero."""
    return tf.identity_n([*results, *tensors])[: len(results)]


def _context() -> tf.distribute.ReplicaContext:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError(
            "Collectives must be called inside `strategy.run`. Received: a call in cross-replica context."
        )
    return context
