"""An engine that runs Horovod's operations, and names eager calls, too."""

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
from tfdist.collectives.interface import call_by_dtype
from tfdist.collectives.no_constant_folding import hide_constant
from tfdist.coordination import Group, LocalGroup, PeerFailureHandler, join
from tfdist.coordination.job_token import LOOPBACK, group_token, job_token, join_address, network_interface
from tfdist.distribution.horovod_rendezvous import start_elastic, start_horovod, start_with_group
from tfdist.errors import InputError
from tfdist.horovod.engine import CallId, Engine, Factors
from tfdist.horovod.ops import ReduceOp
from tfdist.horovod.process_sets import ranks_of

_INIT_SECONDS = 120.0  # time limit for other ranks in `init`
_EAGER_NAMES = 256  # number of cached functions for named eager calls


class HorovodEngine(Engine):
    """Forwards operations to Horovod, except for reduce-scatter (see `reducescatter`).

    `group` is the job's group if this process is already a member. Otherwise, it joins, and passes the group to `on_join`,
    because it stays a member even if Horovod then fails. `options` are arguments of Horovod's `init`.
    """

    reducible_dtypes = HorovodCollectives.dtypes.reducible | {tf.uint8, tf.int8}

    def __init__(self, group: Group | None, on_join: Callable[[Group], None] = lambda group: None, **options: Any):
        self.is_elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        if self.is_elastic:
            key = _key_without_group(is_local=False)
            start_elastic(**options)
            self.group = LocalGroup()  # groups do not support changing members
        else:
            self.group = self._start(group, on_join, options)
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
    def _start(group: Group | None, on_join: Callable[[Group], None], options: dict[str, Any]) -> Group:
        cluster = detect_cluster(os.environ)
        process_sets = ranks_of(options.get("process_sets"), cluster.size)
        if "comm" in options and cluster.size > 1 and "HOROVOD_RANK" not in os.environ and cluster.source != "MPI":
            raise InputError(
                f"hvd.init(comm=...) needs Horovod's or MPI's launcher. Received: {options['comm']!r} under "
                f"{cluster.source}. Start the job with tfdist launch --launcher=horovod, or leave out comm and use "
                "process_sets."
            )

        def join_job(cluster: Cluster) -> Group:
            if "comm" in options:  # a subset of the job's ranks, which has no group
                return LocalGroup()
            job_group = join(cluster, start_timeout=_INIT_SECONDS)
            on_join(job_group)
            _check_process_sets(process_sets, job_group)
            return job_group

        if group is None:
            group = start_horovod(cluster, join_job, **options)
            # Gloo raises an error if a rank is lost, but MPI waits forever.
            if group.size > 1 and hvd.mpi_enabled():
                PeerFailureHandler(group, cluster)
            return group
        _check_process_sets(process_sets, group)
        start_with_group(group, cluster, **options)
        return group

    def collectives_of(self, process_set: Any) -> Collectives:
        if process_set is hvd.global_process_set:
            return self.collectives
        return HorovodCollectives(process_set) if process_set.included() else OneReplica()

    def reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, factors: Factors) -> list[tf.Tensor]:
        scales = dict(zip(("prescale_factor", "postscale_factor"), factors, strict=True))
        totals = _call_by_dtype("allreduce", tensors, call, op=int(op), **scales)
        return [_restore_shape(total, tensor) for total, tensor in zip(totals, tensors, strict=True)]

    def gather(self, tensors: Sequence[tf.Tensor], call: CallId) -> list[tf.Tensor]:
        return _call_by_dtype("allgather", tensors, call)

    def broadcast(self, tensor: tf.Tensor, root: int, call: CallId) -> tf.Tensor:
        return _restore_shape(_call_horovod("broadcast", [tensor], call, root_rank=root), tensor)

    def exchange(self, tensor: tf.Tensor, splits: tf.Tensor, call: CallId) -> tuple[tf.Tensor, tf.Tensor]:
        return _call_horovod("alltoall", [tensor, tf.cast(splits, tf.int32)], call)

    def join(self) -> tf.Tensor:
        last_rank = hvd.join()
        self._has_joined = True
        return last_rank

    def has_no_joined_rank(self) -> bool:
        """See base class.

        Returns False after this rank's first join, because ranks may then reduce the same gradients at different times.
        """
        if self._has_joined:
            return False
        with tf.init_scope():
            [count] = hvd.allreduce(tf.constant([1]), op=hvd.Sum, name="has_no_joined_rank").numpy()
        return count == self.size

    def query(self, name: str, process_set_id: int = 0) -> tf.Tensor:
        """See base class. The value is evaluated at run time."""
        return getattr(hvd, f"{name}_op")(*[process_set_id] if name in ("size", "process_set_included") else [])

    def count(self, process_set: Any) -> int | tf.Tensor:
        return hvd.size_op(process_set.process_set_id) if self.is_elastic else process_set.size()

    def close(self) -> None:
        hvd.shutdown()


def _check_process_sets(process_sets: list[list[int]], group: Group) -> None:
    """Raises `InputError` on every rank if their process sets differ: Horovod cannot recover from this."""
    group.agree("horovod/process_sets", {"process_sets": process_sets}, "The hvd.init argument ", _INIT_SECONDS)


def _restore_shape(result: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Restores the static shape of a result, which `hide_constant` has removed."""
    return tf.reshape(result, []) if tensor.shape.rank == 0 else tf.ensure_shape(result, tensor.shape)


def _key_without_group(is_local: bool) -> str:
    """Returns the key that signs objects, for ranks without a group.

    If all ranks are on this host (`is_local`), or this host runs Horovod's rendezvous server, the key is derived from a key
    of the user. Other hosts do not have this key, so ranks that an elastic job starts there need a token.
    """
    server = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or socket.gethostname()
    host = LOOPBACK if is_local or network_interface(server) else server
    address = join_address(host, int(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT") or 1))
    return group_token(job_token(os.environ, address), "objects", address)


def _call_by_dtype(operation: str, tensors: Sequence[tf.Tensor], call: CallId, **options: Any) -> list[tf.Tensor]:
    """Calls Horovod for a single tensor, or with a group of tensors for each dtype."""
    if len(tensors) == 1:
        return [_call_horovod(operation, tensors, call, **options)]

    def call_grouped(inputs: list[tf.Tensor]) -> Any:
        return _call_horovod(f"grouped_{operation}", inputs, call.with_suffix(inputs[0].dtype.name), **options)

    return call_by_dtype(call_grouped, tensors)


def _call_horovod(operation: str, tensors: Sequence[tf.Tensor], call: CallId, **options: Any) -> Any:
    """Calls Horovod. Named eager calls run in a small graph, because TensorFlow does not name eager operations."""
    all_options = (("process_set", call.process_set), ("ignore_name_scope", call.ignore_name_scope), *options.items())
    if call.has_user_name and tf.executing_eagerly():
        specs = tuple(tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype) for tensor in tensors)
        return _graph_function(operation, call.name, all_options, specs)(*tensors)
    return _function(operation, call.name, all_options)(*tensors)


@functools.lru_cache(maxsize=_EAGER_NAMES)
def _graph_function(operation: str, name: str, options: tuple[tuple[str, Any], ...], specs: Any) -> Callable[..., Any]:
    return tf.function(_function(operation, name, options), autograph=False).get_concrete_function(*specs)


def _function(operation: str, name: str, options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    def function(*tensors: tf.Tensor) -> Any:
        inputs = list(map(hide_constant, tensors))
        arguments = [inputs] if operation.startswith("grouped_") else inputs
        return getattr(hvd, operation)(*arguments, name=name, **dict(options))

    return function
