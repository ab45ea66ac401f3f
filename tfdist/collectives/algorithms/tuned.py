"""Collectives whose all-reduce of floating-point tensors has an algorithm that depends on their size."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.cluster.topology import Topology
from tfdist.collectives.algorithms.catalog import CATALOG
from tfdist.collectives.forwarding import ForwardingCollectives
from tfdist.collectives.interface import Collectives, Op
from tfdist.errors import InputError
from tfdist.grammar.all_reduce import ALGORITHMS, AUTO, ENGINE, AlgorithmTable, AllReduce


class TunedCollectives(ForwardingCollectives):
    """Collectives with algorithms for sums and means, inside `tf.function`, of floating-point tensors with static shapes.

    The tensors of a call that have the same dtype are sent as one message. Everything else is the engine's: other
    operations and dtypes, sizes that may change from step to step, and eager calls, in which a message that waits for
    another one would wait forever. All replicas choose the same algorithm, because shapes and dtypes are equal.

    Attributes:
      topology: the hosts of the replicas.
      table: the algorithms by size in bytes.
      is_measured: whether the table is to be replaced by a measured one.
    """

    def __init__(self, engine: Collectives, topology: Topology, table: AlgorithmTable, *, is_measured: bool = False):
        """Wraps the collectives of an engine.

        Args:
          engine: collectives of all replicas of the job.
          topology: see class attributes.
          table: see class attributes.
          is_measured: see class attributes.
        """
        super().__init__(engine)
        self.topology = topology
        self.table = table
        self.is_measured = is_measured

    def with_table(self, table: AlgorithmTable) -> "TunedCollectives":
        """Returns the same collectives with other algorithms."""
        return TunedCollectives(self._inner, self.topology, table, is_measured=self.is_measured)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class; the cost is that of the algorithm."""
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        results: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors if self._takes(tensor, op)):
            members = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype and self._takes(tensor, op)]
            given = [tensors[i] for i in members]
            elements = sum(tensor.shape.num_elements() for tensor in given)
            algorithm = self.table.algorithm_for(elements * dtype.size)
            if algorithm != ENGINE:
                # TensorFlow rejects a message of another size with the same name, even of another function.
                totals = self._summed(algorithm, given, op, f"{name}/{algorithm}/{dtype.name}_{elements}")
                results |= zip(members, totals, strict=True)
        rest = [i for i in range(len(tensors)) if i not in results]
        if rest:
            results |= zip(rest, self._inner.all_reduce([tensors[i] for i in rest], op, name=name), strict=True)
        return [results[i] for i in range(len(tensors))]

    def _takes(self, tensor: tf.Tensor, op: Op) -> bool:
        """Returns whether an algorithm may sum a tensor."""
        carried = self.wire.reduces & self.wire.gathers
        is_one = tensor.dtype.is_floating and tensor.dtype in carried and op != "max"
        return is_one and tensor.shape.is_fully_defined() and not tf.executing_eagerly()

    def _summed(self, algorithm: str, tensors: Sequence[tf.Tensor], op: Op, name: str) -> list[tf.Tensor]:
        """Sums tensors of one dtype as one vector."""
        with tf.name_scope(algorithm):  # in profiles
            flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
            vector = flat[0] if len(flat) == 1 else tf.concat(flat, 0)
            total = CATALOG[algorithm].sum(self._inner, vector, self.topology, name)
            if op == "mean":
                total /= tf.cast(self.size, total.dtype)
            parts = tf.split(total, [tensor.shape.num_elements() for tensor in tensors])
            return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def tuned_collectives(
    engine: Collectives, choice: AllReduce, topology: Topology, table: AlgorithmTable | None = None
) -> TunedCollectives | None:
    """Returns collectives whose sums use the chosen algorithms; None for the engine's own, and for one replica.

    Args:
      engine: collectives of all replicas of the job.
      choice: as in `--all_reduce`.
      topology: the hosts of the replicas.
      table: the table of the file that `choice` names, if it does.

    Raises:
      InputError: the algorithm does not exist on these hosts.
    """
    if choice.name == ENGINE or engine.size == 1:
        return None
    if choice.name == AUTO:
        return TunedCollectives(engine, topology, table or AlgorithmTable(), is_measured=table is None)
    check_algorithm(choice.name, topology)
    return TunedCollectives(engine, topology, AlgorithmTable.of(choice.name))


def possible_algorithms(topology: Topology) -> tuple[str, ...]:
    """Returns the algorithms that exist on these hosts, the engine first."""
    return tuple(name for name in ALGORITHMS if name != "hierarchical" or _has_levels(topology))


def check_algorithm(name: str, topology: Topology) -> None:
    """Raises `InputError` for hierarchical sums on one host, or with one replica on each."""
    if name != "hierarchical" or _has_levels(topology):
        return
    hosts, replicas = topology.hosts, topology.size
    received = f"one host with {replicas} replicas" if hosts == 1 else f"{hosts} hosts with one replica each"
    raise InputError(
        "--all_reduce=hierarchical needs several hosts, and several replicas on one of them. Received: "
        f"{received}. Give --topology, such as 2,2, or use another algorithm."
    )


def _has_levels(topology: Topology) -> bool:
    """Returns whether there are several hosts, and several replicas on one of them."""
    return 1 < topology.hosts < topology.size
