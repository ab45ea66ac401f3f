"""Groups of processes of tf.distribute, by TensorFlow's own collective operations, which tf.distribute does not expose."""

import hashlib
import itertools
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives.differentiable import OneReplica
from tfdist.collectives.interface import Collectives, Op
from tfdist.collectives.replica_context import ReplicaContextCollectives, without_gradient
from tfdist.errors import InputError

Ranks = tuple[int, ...]
NO_SETS: Mapping[Ranks, object] = types.MappingProxyType({})
_Declared = TypeVar("_Declared")


def distinct_groups(groups: Sequence[Sequence[int]], size: int) -> list[Ranks]:
    """Returns the sets of ranks, each once, without those of one rank or of all, which need no declaration.

    Args:
      groups: ranks of each group, in any order.
      size: number of processes of the job.

    Raises:
      InputError: a group has a rank twice, or one that the job has not.
    """
    for ranks in groups:
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(size)):
            raise InputError(
                f"A group must consist of different ranks from 0 to {size - 1}. Received: {list(ranks)}. Correct groups."
            )
    distinct = dict.fromkeys(tuple(sorted(ranks)) for ranks in groups)
    return [ranks for ranks in distinct if 1 < len(ranks) < size]


def declared_group(declared: Mapping[Ranks, _Declared], ranks: Sequence[int]) -> _Declared:
    """Returns what belongs to a group.

    Raises:
      InputError: the group was not declared.
    """
    key = tuple(sorted(ranks))
    if key not in declared:
        names = ", ".join(str(list(group)) for group in declared) or "none"
        raise InputError(
            f"Groups must be declared when the strategy is created. Received: ranks {list(key)}; declared: {names}. Add "
            f"it: load_strategy(..., groups=[{list(key)}, ...])."
        )
    return declared[key]


def in_order(inner: Collectives, ranks: Sequence[int]) -> Collectives:
    """Returns the collectives of a group in the order of `ranks`.

    Args:
      inner: collectives of these ranks in ascending order.
      ranks: ranks of a larger group.
    """
    ascending = sorted(ranks)
    order = tuple(ascending.index(rank) for rank in ranks)
    return inner if list(ranks) == ascending else Reordered(inner, order)


class Reordered(Collectives):
    """Collectives with other numbers for the same ranks. Operations that depend on the order are composed of gathers."""

    def __init__(self, inner: Collectives, order: tuple[int, ...]):
        """Wraps the collectives of an engine.

        Args:
          inner: collectives in the engine's order.
          order: rank in `inner` of each new rank.
        """
        self._inner = inner
        self._order = order
        self.size = inner.size
        self.wire = inner.wire

    @property
    def rank(self) -> int:
        """See base class."""
        return self._order.index(self._inner.static_rank)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return self._inner.all_reduce(tensors, op, name=name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class; the numbers of rows are gathered, too."""
        rows = tf.stack([tf.shape(tensor)[0] for tensor in tensors])
        table, *gathered = self._inner.all_gather([rows[None], *tensors], name=name)
        results = []
        for i, whole in enumerate(gathered):
            parts = tf.split(whole, tf.ensure_shape(table, [self.size, None])[:, i], num=self.size)
            results.append(tf.concat([parts[index] for index in self._order], 0))
        return results

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return self._inner.broadcast(tensors, self._order[root], name=name)

    def group(self, ranks: Sequence[int]) -> Collectives:
        """See base class."""
        return self._inner.group([self._order[rank] for rank in self.checked(ranks)])

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        """See base class."""
        self.check_message(tensors, to, tag)
        return self._inner.send(tensors, self._order[to], tag=tag)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """See base class."""
        self.check_message(specs, source, tag)
        return self._inner.receive(specs, self._order[source], tag=tag)


# tf.distribute counts its keys from 1 and 100 upwards, by one for each call; DTensor has no collectives in a process that
# uses tf.distribute between processes. This half of all keys is therefore free.
FIRST_KEY = 2**30


class ProcessGroups:
    """Creates the collectives of declared groups of processes, each with one replica."""

    def __init__(
        self,
        declared: Sequence[Ranks],
        size: int,
        local_replicas: int,
        options: tf.distribute.experimental.CommunicationOptions,
    ):
        """Gives each group a key.

        Args:
          declared: groups of 2 to `size` - 1 ranks; the same on every process.
          size: number of processes.
          local_replicas: number of replicas of this process.
          options: communication options, as for tf.distribute.
        """
        self._local_replicas = local_replicas
        self._keys: dict[Ranks, int] = {}
        for ranks in (*declared, tuple(range(size))):
            candidates = itertools.count(_hashed(f"group {ranks}"))
            self._keys[ranks] = next(key for key in candidates if key not in self._keys.values())
        self._calls: dict[int, str] = {}
        self._of_graph: weakref.WeakKeyDictionary[tf.Graph, set[int]] = weakref.WeakKeyDictionary()
        self._tokens = itertools.count()
        self.options = {
            "communication_hint": options.implementation.value.lower(),
            "timeout_seconds": float(options.timeout_seconds or 0),
        }

    def collectives(self, ranks: Sequence[int], rank: int) -> Collectives:
        """Returns the collectives of some ranks of the job, of which `rank` is this process's."""
        if self._local_replicas > 1:
            raise InputError(
                f"Groups of processes need one replica in each. Received: {self._local_replicas} of this process. Start "
                "one process per device."
            )
        if len(ranks) == 1:
            return OneReplica()
        ascending = tuple(sorted(ranks))
        declared_group(self._keys, ascending)
        return in_order(ProcessGroup(ascending, ascending.index(rank), self), ranks)

    def token(self) -> tf.Tensor:
        """Returns a handle for one call only, since TensorFlow runs calls one after another that share one or have none."""
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=f"tfdist/{next(self._tokens)}")

    def arguments(self, ranks: Ranks, call: str) -> dict[str, Any]:
        """Returns what identifies a call in all processes of a group, as arguments of TensorFlow's operations.

        TensorFlow matches calls by their keys. That of a call is computed from the group and the name, so that it does
        not depend on what else a process has traced, how often, or in which order; it is unique in this process.
        """
        name = f"{call} of {list(ranks)}"
        key = _hashed(name)
        if self._calls.setdefault(key, name) != name:
            raise InputError(
                f"Two calls must not have the same key. Received: {name} and {self._calls[key]}. Rename one of them."
            )
        self._check_is_first(key, name)
        identity = {"group_key": declared_group(self._keys, ranks), "instance_key": key, "group_size": len(ranks)}
        return {**identity, **self.options}

    def _check_is_first(self, key: int, name: str) -> None:
        """Raises `InputError` for a second call with a key in the graph that is being built: both would wait for one."""
        if tf.executing_eagerly():
            return
        of_graph = self._of_graph.setdefault(tf.compat.v1.get_default_graph(), set())
        if key in of_graph:
            raise InputError(
                f"A name is used for only one call of a group, or one message, in a step. Received: {name}, twice. Give each "
                "call a name of its own."
            )
        of_graph.add(key)


class ProcessGroup(Collectives):
    """The collectives of some processes; usable inside `strategy.run`."""

    wire = ReplicaContextCollectives.wire

    def __init__(self, ranks: Ranks, rank: int, groups: ProcessGroups):
        """Initializes the collectives.

        Args:
          ranks: ranks in the job, ascending.
          rank: index of this process among them.
          groups: the declared groups.
        """
        self.size = len(ranks)
        self._ranks = ranks
        self._rank = rank
        self._groups = groups

    @property
    def rank(self) -> int:
        """See base class."""
        return self._rank

    def group(self, ranks: Sequence[int]) -> Collectives:
        """See base class."""
        return self._groups.collectives([self._ranks[rank] for rank in self.checked(ranks)], self._ranks[self._rank])

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class; one message for all tensors of a dtype."""
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        reduced: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
            numbers = [i for i, tensor in enumerate(inputs) if tensor.dtype == dtype]
            flat = [tf.reshape(inputs[i], [-1]) for i in numbers]
            if not any(vector.shape[0] for vector in flat):
                flat.append(tf.zeros([1], dtype))  # TensorFlow rejects empty tensors
            vector = tf.concat(flat, 0) if len(flat) > 1 else flat[0]
            whole = tf.raw_ops.CollectiveReduceV2(
                input=vector,
                merge_op="Max" if op == "max" else "Add",
                final_op="Div" if op == "mean" else "Id",
                **self._unordered(f"all_reduce {name}", vector),
            )
            parts = tf.split(whole, [tf.size(vector) for vector in flat])[: len(numbers)]
            reduced |= zip(numbers, parts, strict=True)
        shaped = [tf.reshape(reduced[i], tf.shape(tensor)) for i, tensor in enumerate(inputs)]
        exact = [tf.ensure_shape(value, tensor.shape) for value, tensor in zip(shaped, inputs, strict=True)]
        return without_gradient(exact, "all_reduce")

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class; costs as much as if every rank had the largest number of rows, and a message with these."""
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not inputs:
            return []
        table = self._gather(tf.stack([tf.shape(tensor)[0] for tensor in inputs])[None], f"{name}/rows")
        gathered = [self._gather_rows(tensor, table[:, i], f"{name}/{i}") for i, tensor in enumerate(inputs)]
        return without_gradient(gathered, "all_gather")

    def _gather_rows(self, tensor: tf.Tensor, rows: tf.Tensor, name: str) -> tf.Tensor:
        longest = tf.maximum(tf.reduce_max(rows), 1)  # TensorFlow crashes on empty tensors
        missing = longest - tf.shape(tensor)[0]
        padded = tf.pad(tensor, [[0, missing], *[[0, 0]] * (tensor.shape.rank - 1)])
        whole = self._gather(padded, name, longest)
        parts = [whole[rank * longest :][: rows[rank]] for rank in range(self.size)]
        return tf.ensure_shape(tf.concat(parts, 0), tf.TensorShape([None]).concatenate(tensor.shape[1:]))

    def _gather(self, tensor: tf.Tensor, name: str, rows: tf.Tensor | int = 0) -> tf.Tensor:
        """Gathers a tensor of the same shape from every rank; `rows`: its first dim, if that may change between calls."""
        call = self._unordered(f"all_gather {name}", tensor)
        if tensor.shape[0] is None:  # TensorFlow rejects another shape with the same key
            mixed = tf.cast(call["instance_key"] - FIRST_KEY, tf.int64) + tf.cast(rows, tf.int64) * 2654435761
            call["instance_key"] = FIRST_KEY + tf.cast(mixed % FIRST_KEY, tf.int32)
        whole = tf.raw_ops.CollectiveGatherV2(input=tensor, **call)
        return tf.ensure_shape(whole, tf.TensorShape([None]).concatenate(tensor.shape[1:]))

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See base class; n sent along a tree."""
        results = []
        for i, tensor in enumerate(map(tf.convert_to_tensor, tensors)):
            call = self._call(f"broadcast {name}/{i}", tensor)
            result = _sent(tensor, call) if self._rank == root else _received(tensor.dtype, tf.shape(tensor), call)
            results.append(tf.ensure_shape(result, tensor.shape))
        return without_gradient(results, "broadcast")

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        """See base class."""
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        self.check_message(inputs, to, tag)
        sent = [_sent(tensor, self._message(self._rank, to, f"{tag}/{i}", tensor)) for i, tensor in enumerate(inputs)]
        with tf.control_dependencies(sent):
            return tf.identity(0)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """See base class."""
        self.check_message(specs, source, tag)
        calls = [self._message(source, self._rank, f"{tag}/{i}", spec) for i, spec in enumerate(specs)]
        received = [_received(spec.dtype, spec.shape.as_list(), call) for spec, call in zip(specs, calls, strict=True)]
        return [tf.ensure_shape(tensor, spec.shape) for tensor, spec in zip(received, specs, strict=True)]

    def _unordered(self, call: str, tensor: tf.Tensor) -> dict[str, Any]:
        return {**self._call(call, tensor), "ordering_token": [self._groups.token()]}

    def _call(self, call: str, tensor: tf.Tensor) -> dict[str, Any]:
        return self._groups.arguments(self._ranks, _of_form(call, tensor))

    def _message(self, sender: int, receiver: int, tag: str, form: tf.Tensor | tf.TensorSpec) -> dict[str, Any]:
        source, to = self._ranks[sender], self._ranks[receiver]
        call = _of_form(f"message {tag} from {source}", form)
        return self._groups.arguments((min(source, to), max(source, to)), call)


def _of_form(call: str, form: tf.Tensor | tf.TensorSpec) -> str:
    """Adds dtype and shape to a call: TensorFlow rejects another shape with the same key, even in another function."""
    return f"{call}: {form.dtype.name}{form.shape}"


def _sent(tensor: tf.Tensor, call: Mapping[str, Any]) -> tf.Tensor:
    return keras_internals.always_run(tf.raw_ops.CollectiveBcastSendV2(input=tensor, **call))


def _received(dtype: tf.DType, shape: Any, call: Mapping[str, Any]) -> tf.Tensor:
    return keras_internals.always_run(tf.raw_ops.CollectiveBcastRecvV2(T=dtype, shape=shape, **call))


def _hashed(text: str) -> int:
    return FIRST_KEY + int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % FIRST_KEY
