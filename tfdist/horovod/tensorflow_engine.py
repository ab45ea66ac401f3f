"""The engine for jobs without Horovod, which uses the collectives of a tfdist strategy."""

import functools
import itertools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.factory import load_strategy
from tfdist.errors import InputError, PeerLostError
from tfdist.horovod.engine import CallId, Engine, Factors, horovod_required_error, scale_tensor
from tfdist.horovod.errors import FailedPreconditionError, GraphModeError
from tfdist.horovod.ops import Average, Max, Min, Product, ReduceOp, Sum
from tfdist.horovod.process_sets import global_process_set


class TensorFlowEngine(Engine):
    """Runs operations on tf.distribute's collectives under `tfdist launch` (TF_CONFIG), or in a single process.

    Minimum, maximum, product and all-to-all are composed of gathers, n (N - 1) bytes received for n sent. TensorFlow matches
    calls by order, so each eager or traced call is first compared between ranks. Ranks wait for
    HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, 600 s by default, for a missing rank; 0 means forever. `options` are arguments of
    `init`, none of which is supported.
    """

    def __init__(self, options: dict[str, Any]):
        for name, value in options.items():
            if value:
                raise horovod_required_error(f"hvd.init({name}=...)", f"Remove {name}")
        strategy = load_strategy("auto")
        if len(strategy.local_replicas) != 1:
            raise InputError(
                f"tfdist.horovod uses one device per process. Received: {len(strategy.local_replicas)} in this "
                "process. Start one process per device."
            )
        self._strategy, self.group = strategy, strategy.group
        self.object_key = self.group.token_for("objects")
        self.collectives = strategy.process_collectives
        self._deadline = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 600) or _NO_DEADLINE_SECONDS
        self._call_numbers = itertools.count(1)
        cluster = strategy.cluster
        self.rank, self.size = cluster.rank, cluster.size
        self.local_rank, self.local_size = cluster.local_rank, cluster.local_size
        self.cross_rank, self.cross_size = cluster.rank // cluster.local_size, -(-cluster.size // cluster.local_size)
        self.reducible_dtypes = self.collectives.dtypes.reducible
        global_process_set.set_ranks(self.rank, self.size)

    def collectives_of(self, process_set: Any) -> Collectives:
        if process_set is not global_process_set:
            raise horovod_required_error("A process set of some ranks", "Remove process_set")
        return self.collectives

    def reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, factors: Factors) -> list[tf.Tensor]:
        prescale, postscale = factors
        self._agree(call.name, f"{op.name} (times {prescale:g} before, {postscale:g} after)", tensors)
        inputs = [scale_tensor(tensor, prescale) for tensor in tensors]
        if op in (Sum, Average):
            totals = self.collectives_of(call.process_set).all_reduce(inputs, name=call.name)
            postscale /= self.size if op == Average else 1
        else:
            inputs = [tf.cast(x, tf.float32) if x.dtype == tf.bfloat16 else x for x in inputs]
            stacks = self._gather([x[None] for x in inputs], call)
            results = [functools.reduce(_COMBINE[op], tf.unstack(stack, self.size)) for stack in stacks]
            totals = [tf.cast(result, x.dtype) for result, x in zip(results, tensors, strict=True)]
        return [
            scale_tensor(tf.ensure_shape(total, x.shape), postscale) for total, x in zip(totals, tensors, strict=True)
        ]

    def gather(self, tensors: Sequence[tf.Tensor], call: CallId) -> list[tf.Tensor]:
        self._agree(call.name, "gather", tensors, allows_uneven_rows=True)
        return self._gather(tensors, call)

    def _gather(self, tensors: Sequence[tf.Tensor], call: CallId) -> list[tf.Tensor]:
        return self.collectives_of(call.process_set).all_gather(tensors, name=call.name)

    def broadcast(self, tensor: tf.Tensor, root: int, call: CallId) -> tf.Tensor:
        self._agree(call.name, f"broadcast from rank {root}", [tensor])
        return self.collectives_of(call.process_set).broadcast([tensor], root, name=call.name)[0]

    def exchange(self, tensor: tf.Tensor, splits: tf.Tensor, call: CallId) -> tuple[tf.Tensor, tf.Tensor]:
        self._agree(call.name, "exchange", [tensor], allows_uneven_rows=True)
        rows, table = self._gather([tensor, tf.cast(splits, tf.int32)[None]], call)  # table: [sender, receiver]
        parts = tf.split(rows, tf.reshape(table, [-1]), num=self.size * self.size)[self.rank :: self.size]
        return tf.concat(parts, 0), table[:, self.rank]

    def join(self) -> tf.Tensor:
        raise horovod_required_error("hvd.join()", "Run the same number of steps on every rank (steps_per_epoch)")

    def query(self, name: str, process_set_id: int = 0) -> tf.Tensor:
        if process_set_id:
            raise horovod_required_error("A process set of some ranks", "Remove process_set_id")
        return tf.constant(1 if name == "process_set_included" else getattr(self, name))

    @tf.autograph.experimental.do_not_convert
    def _agree(self, name: str, operation: str, tensors: Sequence[tf.Tensor], allows_uneven_rows: bool = False) -> None:
        """Checks that every rank makes this call next; with `allows_uneven_rows`, their numbers of rows may differ.

        Eager calls are compared before they run, calls in a `tf.function` during tracing: TensorFlow's collectives match calls
        only by order, and a sum on one rank and a mean on another would silently return wrong results. Cost: a round trip to
        rank 0, about a millisecond, per eager or traced call; none when a graph runs.

        Raises:
          FailedPreconditionError: the calls differ; raised on every rank, with all calls.
          GraphModeError: the call is in a TensorFlow 1 graph.
          PeerLostError: a rank is lost or did not make the call within the deadline.
        """
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise GraphModeError(
                f"hvd.{name} in a graph of TensorFlow 1 needs Horovod. Received: a job on tf.distribute's collectives, which "
                "sessions cannot run. Call it eagerly or in a tf.function."
            )
        description = f"{name}: {operation} of {', '.join(_describe(tensor, allows_uneven_rows) for tensor in tensors)}"
        number = next(self._call_numbers)
        try:
            self.group.agree(_CALLS, {f"call {number}": description}, "The hvd ", self._deadline)
        except InputError as error:
            raise FailedPreconditionError(str(error)) from error
        except PeerLostError as error:
            raise PeerLostError(f"The hvd call {number}, {description}, was not made by every rank: {error}") from error

    def close(self) -> None:
        """See base class; waits for all ranks, because a rank must not end before another rank's last collective."""
        end = {f"call {next(self._call_numbers)}": "none, because the program has ended"}
        self.group.agree(_CALLS, end, "The hvd ", self._deadline)
        self._strategy.close()


def _describe(tensor: tf.Tensor, has_uneven_rows: bool) -> str:
    if tensor.shape.rank is None:
        return f"{tensor.dtype.name}[...]"
    sizes = ["?" if size is None else str(size) for size in tensor.shape]
    return f"{tensor.dtype.name}[{', '.join(['rows', *sizes[1:]] if has_uneven_rows else sizes)}]"


_CALLS = "horovod/calls"
_NO_DEADLINE_SECONDS = 1e9
_COMBINE: dict[ReduceOp, Callable[..., tf.Tensor]] = {Min: tf.minimum, Max: tf.maximum, Product: operator.mul}
