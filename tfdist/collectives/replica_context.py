"""Collectives of tf.distribute, through `tf.distribute.get_replica_context()`, which cannot be differentiated."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op, SupportedDtypes, call_by_dtype


def prevent_gradient(tensors: Sequence[tf.Tensor], operation: str) -> list[tf.Tensor]:
    """Returns the same tensors, which raise `LookupError` when a gradient passes through them.

    Args:
      tensors: inputs of an operation, or its results if TensorFlow itself raises an error for the operation.
      operation: name of the operation, for the error.
    """
    message = (
        f"{operation} of these Collectives is not differentiable. Call tfdist.collectives.all_reduce(collectives, tensor, "
        "name=...) or tfdist.collectives.all_gather, which are."
    )
    inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
    return [tf.raw_ops.PreventGradient(input=x, message=message) if x.dtype.is_floating else x for x in inputs]


# (ranks of some replicas, rank of the caller) -> collectives of these replicas
MakeGroup = Callable[[tuple[int, ...], int], Collectives]


class ReplicaContextCollectives(Collectives):
    """The collectives of any tf.distribute strategy; usable inside `strategy.run` only.

    The engine supports sum and mean, but neither max nor reduce-scatter nor all-to-all: a maximum is computed locally after
    a gather, n (N - 1) bytes sent, and the others use the default implementations. Between processes, an all-gather of
    different numbers of rows costs as much as if every replica had the largest number.
    """

    dtypes = SupportedDtypes(
        reducible=frozenset([tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64]),
        gatherable=frozenset([tf.float16, tf.float32, tf.float64, tf.int32, tf.int64]),
        packed=tf.int32,
        send_only=frozenset([tf.bool]),
    )

    def __init__(
        self,
        size: int,
        options: tf.distribute.experimental.CommunicationOptions | None = None,
        make_group: MakeGroup | None = None,
    ):
        """Initializes the collectives of `size` replicas.

        `make_group` creates the collectives of groups, which tf.distribute does not support. With None, there are no groups.
        """
        self.size = size
        self._options = options
        self._make_group = make_group

    @property
    def rank(self) -> tf.Tensor | int:
        return _context().replica_id_in_sync_group

    def group(self, ranks: Sequence[int]) -> Collectives:
        if self._make_group is None or tuple(ranks) == tuple(range(self.size)):
            return super().group(ranks)
        return self._make_group(self.check_ranks(ranks), self.static_rank)

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        return self._group_of_all().send(tensors, to, tag=tag)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        return self._group_of_all().receive(specs, source, tag=tag)

    def _group_of_all(self) -> Collectives:
        if self._make_group is None:
            raise self._unsupported_error("a message")
        return self._make_group(tuple(range(self.size)), self.static_rank)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        if op == "max":
            stacks = self.stack(tensors, name=name)
            return [tf.reduce_max(stack, axis=0) for stack in stacks]

        def reduce(inputs: list[tf.Tensor]) -> list[tf.Tensor]:  # one vector per call between processes
            results = _context().all_reduce(op.upper(), _detach(inputs), self._options)
            return prevent_gradient(_link_inputs(results, inputs), "all_reduce")

        return call_by_dtype(reduce, tensors)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        results = _context().all_gather(_detach(tensors), 0, self._options)
        return prevent_gradient(_link_inputs(results, tensors), "all_gather")

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """See base class. With splits, replica 0 sends itself an extra row, because TensorFlow crashes on empty gathers."""
        if splits is None:
            return super().all_to_all(tensors, name=name)
        extra_rows = tf.cast(tf.equal(self.rank, 0), tf.int32)
        padded_tensors = [tf.pad(tensor, [[extra_rows, 0], *[[0, 0]] * (tensor.shape.rank - 1)]) for tensor in tensors]
        padded_splits = self._validate_splits(splits, tensors, name) + extra_rows * tf.one_hot(
            0, self.size, dtype=tf.int32
        )
        return [rows[extra_rows:] for rows in super().all_to_all(padded_tensors, name=name, splits=padded_splits)]


def _detach(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Detaches tensors from the graph, which the engine searches for variables.

    Within one process, results depend on the models of all replicas: the search would take seconds in a large model. The
    engine also rejects arguments of the function ("destinations can not be empty").
    """
    return [tf.stop_gradient(tensor) for tensor in tensors]


def _link_inputs(results: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Connects results to `tensors` in the graph, so a gradient raises an error instead of being zero."""
    return tf.identity_n([*results, *tensors])[: len(results)]


def _context() -> tf.distribute.ReplicaContext:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError(
            "Collectives must be called inside `strategy.run`. Received: a call in cross-replica context."
        )
    return context
