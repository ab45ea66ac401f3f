"""Collectives for groups of tf.distribute processes, built on TensorFlow operations that tf.distribute does not expose."""

import collections
import hashlib
import itertools
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.differentiable import OneReplica
from tfdist.collectives.interface import Collectives, Op, call_by_dtype
from tfdist.collectives.replica_context import ReplicaContextCollectives, prevent_gradient
from tfdist.errors import InputError

Ranks = tuple[int, ...]
NO_SETS: Mapping[Ranks, object] = types.MappingProxyType({})
_Group = TypeVar("_Group")


def distinct_groups(groups: Sequence[Sequence[int]], size: int) -> list[Ranks]:
    """Returns the unique sets of ranks, without sets of one rank or of all `size` ranks, which need no declaration.

    Raises:
      InputError: a group contains a rank twice, or an invalid rank.
    """
    for ranks in groups:
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(size)):
            raise InputError(
                f"A group must consist of different ranks from 0 to {size - 1}. Received: {list(ranks)}. Correct the groups."
            )
    unique_groups = dict.fromkeys(tuple(sorted(ranks)) for ranks in groups)
    return [ranks for ranks in unique_groups if 1 < len(ranks) < size]


def declared_group(groups: Mapping[Ranks, _Group], ranks: Sequence[int]) -> _Group:
    """Returns the value of a group; raises `InputError` if the group was not declared."""
    key = tuple(sorted(ranks))
    if key not in groups:
        names = ", ".join(str(list(group)) for group in groups) or "none"
        raise InputError(
            f"Groups must be declared when the strategy is created. Received: ranks {list(key)}; declared: {names}. Add "
            f"them: load_strategy(..., groups=[{list(key)}, ...])."
        )
    return groups[key]


# tf.distribute numbers its keys consecutively from 1 and 100, and DTensor has no collectives in a process that uses
# tf.distribute between processes. This half of all keys is therefore free.
FIRST_KEY = 2**30


class ProcessGroups:
    """Creates the collectives of declared groups of processes, each with one replica."""

    def __init__(
        self,
        groups: Sequence[Ranks],
        size: int,
        local_replicas: int,
        options: tf.distribute.experimental.CommunicationOptions,
    ):
        """Assigns a key to each group of 2 to `size` - 1 ranks, the same on every process, and to the group of all ranks."""
        self._local_replicas = local_replicas
        self._keys: dict[Ranks, int] = {}
        for ranks in (*groups, tuple(range(size))):
            candidates = itertools.count(_hash(f"group {ranks}"))
            self._keys[ranks] = next(key for key in candidates if key not in self._keys.values())
        self._calls: dict[int, str] = {}
        self._graph_names: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]] = weakref.WeakKeyDictionary()
        self._tokens = itertools.count()
        self.options = {
            "communication_hint": options.implementation.value.lower(),
            "timeout_seconds": float(options.timeout_seconds or 0),
        }

    def collectives(self, ranks: Sequence[int], rank: int) -> Collectives:
        """Returns the collectives of some ranks of the job; `rank` is this process's rank."""
        if self._local_replicas > 1:
            raise InputError(
                f"Groups of processes need one replica per process. Received: {self._local_replicas} in this process. Start "
                "one process per device."
            )
        if len(ranks) == 1:
            return OneReplica()
        declared_group(self._keys, ranks)
        return ProcessGroup(tuple(ranks), ranks.index(rank), self)

    def token(self) -> tf.Tensor:
        """Returns a handle for a single call, because TensorFlow runs calls that share a handle, or have none, sequentially."""
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=f"tfdist/{next(self._tokens)}")

    def arguments(self, ranks: Ranks, call: str) -> dict[str, Any]:
        """Returns the arguments of TensorFlow's operations that identify a call in all processes of a group.

        TensorFlow matches calls by key. The key is computed from the group and the name, so it does not depend on other
        traces of a process or their order; it is unique in this process.
        """
        name = f"{call} of {list(ranks)}"
        if not tf.executing_eagerly():
            names = self._graph_names.setdefault(tf.compat.v1.get_default_graph(), collections.Counter())
            names[name] += 1
            name += f", {names[name]}" * (names[name] > 1)
        key = _hash(name)
        if self._calls.setdefault(key, name) != name:
            raise InputError(
                f"Two calls must not have the same key. Received: {name} and {self._calls[key]}. Rename one of them."
            )
        identity = {"group_key": declared_group(self._keys, ranks), "instance_key": key, "group_size": len(ranks)}
        return {**identity, **self.options}


class ProcessGroup(Collectives):
    """The collectives of some processes; usable inside `strategy.run`."""

    rank: int = 0
    dtypes = ReplicaContextCollectives.dtypes

    def __init__(self, ranks: Ranks, rank: int, groups: ProcessGroups):
        """Initializes the collectives of `ranks`, in ascending order; `rank` is the index of this process among them."""
        self.size, self.rank = len(ranks), rank
        self._ranks, self._groups = ranks, groups

    def group(self, ranks: Sequence[int]) -> Collectives:
        return self._groups.collectives([self._ranks[rank] for rank in self.check_ranks(ranks)], self._ranks[self.rank])

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class. Sends one message for all tensors of a dtype."""

        def reduce(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
            vectors = [tf.reshape(tensor, [-1]) for tensor in inputs]
            if not any(vector.shape[0] for vector in vectors):
                vectors.append(tf.zeros([1], inputs[0].dtype))  # TensorFlow rejects empty tensors
            vector = tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]
            total = tf.raw_ops.CollectiveReduceV2(
                input=vector,
                merge_op="Max" if op == "max" else "Add",
                final_op="Div" if op == "mean" else "Id",
                **self._unordered_call(f"all_reduce {name}", vector),
            )
            parts = zip(inputs, tf.split(total, [tf.size(vector) for vector in vectors]), strict=False)
            return [tf.ensure_shape(tf.reshape(part, tf.shape(tensor)), tensor.shape) for tensor, part in parts]

        return prevent_gradient(call_by_dtype(reduce, list(map(tf.convert_to_tensor, tensors))), "all_reduce")

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class. Pads to the largest number of rows, and sends an additional message with the numbers of rows."""
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not inputs:
            return []
        table = self._gather(tf.stack([tf.shape(tensor)[0] for tensor in inputs])[None], f"{name}/rows")
        results = [self._gather_rows(tensor, table[:, i], f"{name}/{i}") for i, tensor in enumerate(inputs)]
        return prevent_gradient(results, "all_gather")

    def _gather_rows(self, tensor: tf.Tensor, rows: tf.Tensor, name: str) -> tf.Tensor:
        max_rows = tf.maximum(tf.reduce_max(rows), 1)  # TensorFlow crashes on empty tensors
        padding_rows = max_rows - tf.shape(tensor)[0]
        all_rows = self._gather(tf.pad(tensor, [[0, padding_rows], *[[0, 0]] * (tensor.shape.rank - 1)]), name)
        parts = [all_rows[rank * max_rows :][: rows[rank]] for rank in range(self.size)]
        return tf.ensure_shape(tf.concat(parts, 0), tf.TensorShape([None]).concatenate(tensor.shape[1:]))

    def _gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        result = tf.raw_ops.CollectiveGatherV2(input=tensor, **self._unordered_call(f"all_gather {name}", tensor))
        return tf.ensure_shape(result, tf.TensorShape([None]).concatenate(tensor.shape[1:]))

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See base class. Cost: n sent along a tree."""
        results = []
        for i, tensor in enumerate(map(tf.convert_to_tensor, tensors)):
            call = self._call(f"broadcast {name}/{i}", tensor)
            result = _send_op(tensor, call) if self.rank == root else _receive_op(tensor.dtype, tf.shape(tensor), call)
            results.append(tf.ensure_shape(result, tensor.shape))
        return prevent_gradient(results, "broadcast")

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        self.check_message(inputs, to, tag)
        operations = [
            _send_op(tensor, self._message(self.rank, to, f"{tag}/{i}", tensor)) for i, tensor in enumerate(inputs)
        ]
        with tf.control_dependencies(operations):
            return tf.identity(0)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        self.check_message(specs, source, tag)
        calls = [self._message(source, self.rank, f"{tag}/{i}", spec) for i, spec in enumerate(specs)]
        tensors = [_receive_op(spec.dtype, spec.shape.as_list(), call) for spec, call in zip(specs, calls, strict=True)]
        return [tf.ensure_shape(tensor, spec.shape) for tensor, spec in zip(tensors, specs, strict=True)]

    def _unordered_call(self, name: str, tensor: tf.Tensor) -> dict[str, Any]:
        call = {**self._call(name, tensor), "ordering_token": [self._groups.token()]}
        if tensor.shape[0] is None:  # TensorFlow rejects another shape with the same key
            rows = tf.shape(tensor, tf.int64)[0]
            key_hash = tf.cast(call["instance_key"] - FIRST_KEY, tf.int64) + rows * 2654435761
            call["instance_key"] = FIRST_KEY + tf.cast(key_hash % FIRST_KEY, tf.int32)
        return call

    def _call(self, call: str, tensor: tf.Tensor) -> dict[str, Any]:
        return self._groups.arguments(self._ranks, _call_name(call, tensor))

    def _message(self, sender: int, receiver: int, tag: str, spec: tf.Tensor | tf.TensorSpec) -> dict[str, Any]:
        sender_rank, receiver_rank = self._ranks[sender], self._ranks[receiver]
        call = _call_name(f"message {tag} from {sender_rank}", spec)
        return self._groups.arguments((min(sender_rank, receiver_rank), max(sender_rank, receiver_rank)), call)


def _call_name(call: str, spec: tf.Tensor | tf.TensorSpec) -> str:
    """Adds dtype and shape to a call's name, because TensorFlow rejects another shape with the same key in any function."""
    return f"{call}: {spec.dtype.name}{spec.shape}"


def _send_op(tensor: tf.Tensor, call: Mapping[str, Any]) -> tf.Tensor:
    return keras_internals.always_run(tf.raw_ops.CollectiveBcastSendV2(input=tensor, **call))


def _receive_op(dtype: tf.DType, shape: Any, call: Mapping[str, Any]) -> tf.Tensor:
    return keras_internals.always_run(tf.raw_ops.CollectiveBcastRecvV2(T=dtype, shape=shape, **call))


def _hash(text: str) -> int:
    return FIRST_KEY + int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % FIRST_KEY
