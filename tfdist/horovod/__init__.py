"""Horovod's Python API for Keras 3: import `tfdist.horovod as hvd` instead of Horovod's own and change nothing else.

Replaces `horovod.tensorflow`, `horovod.tensorflow.keras` and `horovod.keras`, whose optimizers do not reduce gradients under
Keras 3. Operations are Horovod's; tfdist's reducers sum gradients in buckets, with any compression method.

If Horovod is not installed, the same script runs on tf.distribute's collectives, under `tfdist launch` or in a single
process; `init` must then precede any other use of TensorFlow. Gradients, broadcasts, gathers, objects and callbacks work;
process sets of some ranks, `join`, `elastic`, timelines, arguments of `init`, a second `init`, and `steps_per_execution`
above 1 raise `InputError` with an alternative. `alltoall`, `reducescatter`, Min, Max and Product are composed of gathers, at
N times the bytes. Every rank must trace the same functions in the same order: each traced or eager call is first compared
over the job's group.

Objects (`broadcast_object`, `allgather_object`, elastic states) are pickled, and signed with the job's token.
"""

from typing import Any

from tensorflow import executing_eagerly as _executing_eagerly  # used by scripts

from tfdist.horovod import callbacks, elastic
from tfdist.horovod.compression import Compression, Compressor
from tfdist.horovod.errors import UnknownNameError
from tfdist.horovod.module_aliases import add_keras2_names, mpi_ops, refs_to_vars, util, vars_to_refs
from tfdist.horovod.object_exchange import (
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from tfdist.horovod.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from tfdist.horovod.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    check_num_rank_power_of_2,
    handle_average_backwards_compatibility,
)
from tfdist.horovod.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from tfdist.horovod.process import (
    add_process_set,
    ccl_built,
    check_extension,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from tfdist.horovod.process_sets import ProcessSet, global_process_set
from tfdist.horovod.sync_batch_norm import SyncBatchNormalization
from tfdist.horovod.tape import DistributedGradientTape, PartialDistributedGradientTape

_ALTERNATIVES = {
    "BroadcastGlobalVariablesHook": "hvd.callbacks.BroadcastGlobalVariablesCallback or hvd.broadcast_variables",
    "LocalGradientAggregationHelper": "backward_passes_per_step of hvd.DistributedOptimizer",
    "is_version_greater_equal_than": "packaging.version",
    "split_list": "numpy.array_split",
}

add_keras2_names()


def __getattr__(name: str) -> Any:
    if name in _ALTERNATIVES:
        raise UnknownNameError(f"tfdist.horovod has no {name}. Received: hvd.{name}. Use {_ALTERNATIVES[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "util",
    "vars_to_refs",
]
