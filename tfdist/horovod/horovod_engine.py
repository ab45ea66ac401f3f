"""The engine on Horovod: its operations, with names even for eager calls."""

import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from tfdist.cluster.environment import Cluster, detect_cluster
from tfdist.collectives import Collectives, OneReplica
from tfdist.collectives.horovod import HorovodCollectives
from tfdist.collectives.no_constant_folding import not_constant
from tfdist.coordination import Group, LocalGroup, PeerFailureHandler, join
from tfdist.coordination.job_token import LOOPBACK, group_token, job_token, join_address, network_interface
from tfdist.distribution.horovod_rendezvous import start_elastic, start_horovod, start_through
from tfdist.errors import InputError
from tfdist.horovod.engine import CallId, Engine
from tfdist.horovod.ops import ReduceOp
from tfdist.horovod.process_sets import ranks_of

_INIT_SECONDS = 120.0  # how long `init` waits for the other ranks
_EAGER_NAMES = 256  # number of functions cached for named eager calls


class HorovodEngine(Engine):
    """Forwards each operation to Horovod's, except reduce-scatter, which is not used (see `reducescatter`).

    Args:
      group: group of which this process is already a member; None to join the job's.
      joined: called with the job's group as soon as this process is a member, which it remains if Horovod then fails.
      **options: arguments of Horovod's `init`.
    """

    _integers = frozenset([tf.uint8, tf.int8, tf.int32, tf.int64])
    _floats = frozenset([tf.float16, tf.float32, tf.float64])
    reduces = _integers | _floats
    moves = reduces | {tf.uint16, tf.int16, tf.bool}

    def __init__(self, group: Group | None, joined: Callable[[Group], None] = lambda group: None, **options: Any):
        self.is_elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        if self.is_elastic:
            key = _key_without_group(is_local=False)
            start_elastic(**options)
            self.group = LocalGroup()  # members change with each reset, which no group supports
        else:
            self.group = self._started(group, joined, options)
            is_local = hvd.local_size() == hvd.size()
            key = self.group.token_for("objects") if self.group.size == hvd.size() else _key_without_group(is_local)
        self.object_key = key
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.cross_rank, self.cross_size = hvd.cross_rank(), hvd.cross_size()
        self.is_homogeneous = hvd.is_homogeneous()
        self.collectives = HorovodCollectives()
        self._has_joined = False

    @staticmethod
    def _started(group: Group | None, joined: Callable[[Group], None], options: dict[str, Any]) -> Group:
        cluster = detect_cluster(os.environ)
        process_sets = ranks_of(options.get("process_sets"), cluster.size)
        if "comm" in options and cluster.size > 1 and "HOROVOD_RANK" not in os.environ and cluster.source != "MPI":
            raise InputError(
                f"hvd.init(comm=...) needs Horovod's or MPI's launcher. Received: {options['comm']!r} under "
                f"{cluster.source}. Start the job with tfdist launch --launcher=horovod, or leave out comm and use "
                "process_sets."
            )

        def join_job(cluster: Cluster) -> Group:
            if "comm" in options:  # fewer ranks than the job, for which there is no group
                return LocalGroup()
            member = join(cluster, start_timeout=_INIT_SECONDS)
            joined(member)
            _check_process_sets(process_sets, member)
            return member

        if group is None:
            joined_group = start_horovod(cluster, join_job, **options)
            # Gloo raises an error if a rank is lost; MPI would wait for it forever.
            if joined_group.size > 1 and hvd.mpi_enabled():
                PeerFailureHandler(joined_group, cluster)
            return joined_group
        _check_process_sets(process_sets, group)
        start_through(group, cluster, **options)
        return group

    def collectives_of(self, process_set: Any) -> Collectives:
        """See base class."""
        if process_set is hvd.global_process_set:
            return self.collectives
        return HorovodCollectives(process_set) if process_set.included() else OneReplica()

    def reduce(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, prescale: float, postscale: float
    ) -> list[tf.Tensor]:
        """See base class."""
        scales = {"prescale_factor": prescale, "postscale_factor": postscale}
        reduced = _call_by_dtype(hvd.allreduce, _grouped_allreduce, tensors, call, op=int(op), **scales)
        return [_with_shape_of(result, tensor) for result, tensor in zip(reduced, tensors, strict=True)]

    def gather(self, tensors: Sequence[tf.Tensor], call: CallId) -> list[tf.Tensor]:
        """See base class."""
        return _call_by_dtype(hvd.allgather, _grouped_allgather, tensors, call)

    def broadcast(self, tensor: tf.Tensor, root: int, call: CallId) -> tf.Tensor:
        """See base class."""
        return _with_shape_of(_call_horovod(hvd.broadcast, [tensor], call, root_rank=root), tensor)

    def exchange(self, tensor: tf.Tensor, splits: tf.Tensor, call: CallId) -> tuple[tf.Tensor, tf.Tensor]:
        """See base class."""
        return _call_horovod(_alltoall, [tensor, tf.cast(splits, tf.int32)], call)

    def join(self) -> tf.Tensor:
        """See base class."""
        last = hvd.join()
        self._has_joined = True
        return last

    def has_no_joined_rank(self) -> bool:
        """See base class; False from the first join on, as ranks may then see the same gradients at different times."""
        if self._has_joined:
            return False
        with tf.init_scope():
            [present] = hvd.allreduce(tf.constant([1]), op=hvd.Sum, name="has_no_joined_rank").numpy()
        return present == self.size

    def size_of(self, process_set_id: int) -> tf.Tensor:
        """See base class; evaluated at run time."""
        return hvd.size_op(process_set_id)

    def included_in(self, process_set_id: int) -> tf.Tensor:
        """See base class; evaluated at run time."""
        return hvd.process_set_included_op(process_set_id)

    def rank_of(self, kind: str) -> tf.Tensor:
        """See base class; evaluated at run time."""
        return getattr(hvd, f"{kind}_op")()

    def count(self, process_set: Any) -> int | tf.Tensor:
        """See base class."""
        return hvd.size_op(process_set.process_set_id) if self.is_elastic else process_set.size()

    def close(self) -> None:
        """See base class."""
        hvd.shutdown()


def _check_process_sets(process_sets: list[list[int]], group: Group) -> None:
    """Raises `InputError` on every rank if their process sets differ, from which Horovod does not recover."""
    group.agree("horovod/process_sets", {"process_sets": process_sets}, "The hvd.init argument ", _INIT_SECONDS)


def _with_shape_of(result: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Restores the static shape of a result, which `not_constant` has changed."""
    return tf.reshape(result, []) if tensor.shape.rank == 0 else tf.ensure_shape(result, tensor.shape)


def _alltoall(tensor: tf.Tensor, splits: tf.Tensor, **options: Any) -> Any:
    return hvd.alltoall(tensor, splits=splits, **options)


def _grouped_allreduce(*tensors: tf.Tensor, **options: Any) -> list[tf.Tensor]:
    return hvd.grouped_allreduce(list(tensors), **options)


def _grouped_allgather(*tensors: tf.Tensor, **options: Any) -> list[tf.Tensor]:
    return hvd.grouped_allgather(list(tensors), **options)


def _key_without_group(is_local: bool) -> str:
    """Returns the key of objects for ranks that have no group of their own.

    Ranks on the host of Horovod's rendezvous use a key of their user, which other hosts do not have: ranks that an elastic
    job starts there need a token.

    Args:
      is_local: whether all ranks are on this host.
    """
    served = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or socket.gethostname()
    host = LOOPBACK if is_local or network_interface(served) else served
    address = join_address(host, int(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT") or 1))
    return group_token(job_token(os.environ, address), "objects", address)


def _call_by_dtype(
    single: Callable[..., Any], grouped: Callable[..., Any], tensors: Sequence[tf.Tensor], call: CallId, **options: Any
) -> list[tf.Tensor]:
    """Makes one call, or one per dtype if there are several tensors, since grouped calls take a single dtype."""
    if len(tensors) == 1:
        return [_call_horovod(single, tensors, call, **options)]
    results = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        dtype_call = dataclasses.replace(call, name=f"{call.name}_{dtype.name}")
        for i, result in zip(
            indices, _call_horovod(grouped, [tensors[i] for i in indices], dtype_call, **options), strict=True
        ):
            results[i] = result
    return results


def _call_horovod(function: Callable[..., Any], tensors: Sequence[tf.Tensor], call: CallId, **options: Any) -> Any:
    """Makes one call; a named eager call runs in a small graph, since TensorFlow does not name eager operations."""
    all_options = (("process_set", call.process_set), ("ignore_name_scope", call.ignore_name_scope), *options.items())
    if call.explicit and tf.executing_eagerly():
        specs = tuple(tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype) for tensor in tensors)
        return _in_graph(function, call.name, all_options, specs)(*tensors)
    return _operation(function, call.name, all_options)(*tensors)


@functools.lru_cache(maxsize=_EAGER_NAMES)
def _in_graph(
    function: Callable[..., Any],
    name: str,
    options: tuple[tuple[str, Any], ...],
    specs: tuple[tf.TensorSpec, ...],
) -> Callable[..., Any]:
    operation = tf.function(_operation(function, name, options), autograph=False)
    return operation.get_concrete_function(*specs)


def _operation(function: Callable[..., Any], name: str, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    def operation(*tensors: tf.Tensor) -> Any:
        return function(*map(not_constant, tensors), name=name, **dict(options))

    return operation
