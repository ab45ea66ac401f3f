"""All-reduce algorithms, chosen by size: ring, recursive doubling, halving and doubling, and hierarchical."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.cluster.topology import Topology
from tfdist.collectives.forwarding import ForwardingCollectives
from tfdist.collectives.interface import Collectives, Op
from tfdist.config.all_reduce import ALGORITHMS, ENGINE, AlgorithmTable
from tfdist.errors import InputError


def pad_to_multiple(vector: tf.Tensor, parts: int) -> tf.Tensor:
    """Pads a vector with zeros so that it can be divided into equal parts."""
    return tf.pad(vector, [[0, -vector.shape[0] % parts]])


def receive(collectives: Collectives, reference: tf.Tensor, source: int, tag: str) -> tf.Tensor:
    """Receives a vector with the shape and dtype of a reference."""
    [result] = collectives.receive([tf.TensorSpec(reference.shape, reference.dtype)], source, tag=tag)
    return result


def send_receive(collectives: Collectives, tensor: tf.Tensor, partner: int, name: str) -> tf.Tensor:
    """Exchanges vectors with a partner. Cost: n sent.

    An engine with a native all-to-all also gathers in one message, in both directions at the same time, whereas a send and a
    receive would be sequential. On other engines, a gather needs an additional message with each rank's number of rows.
    """
    if not collectives.dtypes.native_all_to_all:
        collectives.send([tensor], partner, tag=name)
        return receive(collectives, tensor, partner, name)
    pair = collectives.group(sorted((collectives.static_rank, partner)))
    [pair_values] = pair.all_gather([tensor], name=name)
    size = tensor.shape[0]
    return tf.ensure_shape(pair_values[:size] if pair.static_rank else pair_values[size:], tensor.shape)


class Folding:
    """Reduces any number of replicas to a power of two before a sum, as in Thakur et al. (2005), section 4.5.

    Of N = P + E replicas, P a power of two, the first 2 E form pairs. The first replica of a pair sends its vector to the
    second, which takes part in the sum for both and returns the result. Cost: two more steps, and 2 n bytes per pair.
    """

    def __init__(self, replicas: int):
        self.members = 1 << (replicas.bit_length() - 1)  # the largest power of two
        self._extra = replicas - self.members

    def rank_of(self, member: int) -> int:
        """Returns the rank of a member, one of the P replicas that compute the sum."""
        return 2 * member + 1 if member < self._extra else member + self._extra

    def pairs(self) -> list[tuple[int, int]]:
        """Returns the ranks of each pair."""
        return [(2 * i, 2 * i + 1) for i in range(self._extra)]

    def partners(self) -> list[tuple[int, int]]:
        """Returns the pairs of ranks, in ascending order, of members whose indices differ in one bit."""
        pairs = [(i, i ^ bit) for bit in self.bits() for i in range(self.members) if not i & bit]
        return [(self.rank_of(i), self.rank_of(j)) for i, j in pairs]

    def bits(self) -> list[int]:
        """Returns 1, 2, 4, ... below the number of members."""
        return [1 << i for i in range(self.members.bit_length() - 1)]

    def sum(
        self,
        collectives: Collectives,
        vector: tf.Tensor,
        sum_over_members: Callable[[tf.Tensor, int], tf.Tensor],
        name: str,
    ) -> tf.Tensor:
        """Returns the sum over all replicas.

        `sum_over_members` takes a vector and this replica's index among the members, and is called only on members.
        """
        rank = collectives.static_rank
        if rank >= 2 * self._extra:
            return sum_over_members(vector, rank - self._extra)
        if rank % 2:
            pair_sum = receive(collectives, vector, rank - 1, f"{name}/fold") + vector
            total = sum_over_members(pair_sum, rank // 2)
            collectives.send([total], rank - 1, tag=f"{name}/unfold")
            return total
        collectives.send([vector], rank + 1, tag=f"{name}/fold")
        return receive(collectives, vector, rank + 1, f"{name}/unfold")


def tree(collectives: Collectives, vector: tf.Tensor, topology: Topology, name: str) -> tf.Tensor:
    """Sums a vector by recursive doubling, along N binomial trees at the same time, each rooted at one replica.

    In step i, replicas whose indices differ in bit i exchange their partial sums and add them. a + b on one replica and
    b + a on the other have the same bits.

    Steps: log2 N, and two more if N is not a power of two; see `Folding`. Sent: n log2 N. Suited to small vectors, whose
    time is determined by the number of steps.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005.
    """
    folding = Folding(collectives.size)

    def double(total: tf.Tensor, member: int) -> tf.Tensor:
        for bit in folding.bits():
            partner = folding.rank_of(member ^ bit)
            total += send_receive(collectives, total, partner, f"{name}/distance{bit}")
        return total

    return folding.sum(collectives, vector, double, name)


def tree_groups(topology: Topology) -> list[tuple[int, ...]]:
    """Returns the pairs of replicas that communicate."""
    folding = Folding(topology.size)
    return [*folding.pairs(), *folding.partners()]


def halving_doubling(collectives: Collectives, vector: tf.Tensor, topology: Topology, name: str) -> tf.Tensor:
    """Sums a vector by recursive halving (a reduce-scatter) and recursive doubling (an all-gather).

    In each of log2 N steps, replicas whose indices differ in one bit, the lowest first, halve their parts: each sends the half
    that its partner keeps, and adds the half that it receives. Each replica then has the sum of one part, and in log2 N more
    steps, the highest bit first, the pairs exchange their parts. The largest messages are between neighbors, usually inside
    a host.

    Steps: 2 log2 N, and two more if N is not a power of two; see `Folding`. Sent: 2 n (N - 1) / N for a power of two, half of
    it in the first halving and the last doubling. Suited to medium-sized vectors.

    Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
    """
    folding = Folding(collectives.size)

    def halve_and_double(part: tf.Tensor, member: int) -> tf.Tensor:
        part = pad_to_multiple(part, folding.members)
        for bit in folding.bits():
            lower, upper = tf.split(part, 2)
            kept_half, sent_half = (upper, lower) if member & bit else (lower, upper)
            part = kept_half + send_receive(
                collectives, sent_half, folding.rank_of(member ^ bit), f"{name}/halving{bit}"
            )
        for bit in reversed(folding.bits()):
            partner_part = send_receive(collectives, part, folding.rank_of(member ^ bit), f"{name}/doubling{bit}")
            part = tf.concat([partner_part, part] if member & bit else [part, partner_part], 0)
        return part[: vector.shape[0]]

    return folding.sum(collectives, vector, halve_and_double, name)


def hierarchical(collectives: Collectives, vector: tf.Tensor, topology: Topology, name: str) -> tf.Tensor:
    """Sums a vector inside each host and between hosts, and distributes the result inside each host.

    With L replicas on each of H hosts, a reduce-scatter inside the host computes the sum of one of L parts on each replica.
    The replicas with the same part, one per host, all-reduce it, and an all-gather inside the host joins the parts.

    Steps: those of the engine's reduce-scatter, all-reduce and all-gather. Sent by a host to others: 2 n (H - 1) / H, 1 / L
    of it by each replica. A ring in rank order sends 2 n (N - 1) / N from each host to the next, 1.5 times as much on 2 x 2
    replicas. Suited to links that are slower between hosts than inside.

    Like Horovod's HOROVOD_HIERARCHICAL_ALLREDUCE: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning
    in TensorFlow", 2018.
    """
    rank = collectives.static_rank
    host_ranks = topology.ranks_of(topology.host_by_rank[rank])
    inside = collectives.group(host_ranks)
    [part] = inside.reduce_scatter([pad_to_multiple(vector, len(host_ranks))], name=f"{name}/inside")
    peers = [topology.ranks_of(host)[host_ranks.index(rank)] for host in range(topology.hosts)]
    [part] = collectives.group(peers).all_reduce([part], name=f"{name}/between")
    [result] = inside.all_gather([part], name=f"{name}/return")
    return tf.ensure_shape(result, [part.shape[0] * len(host_ranks)])[: vector.shape[0]]


def hierarchical_groups(topology: Topology) -> list[tuple[int, ...]]:
    """Returns the groups of replicas on each host, and the groups that communicate between hosts."""
    inside = [tuple(topology.ranks_of(host)) for host in range(topology.hosts)]
    return [*inside, *zip(*inside, strict=True)]


def ring(collectives: Collectives, vector: tf.Tensor, topology: Topology, name: str) -> tf.Tensor:
    """Sums a vector around a ring in rank order; replica r sends to r + 1 and receives from r - 1 only.

    The vector is divided into N parts. In each of N - 1 steps, a replica sends one part and adds its own to the part that it
    receives, after which it has the sum of one part. In N - 1 more steps, the sums are passed around. Each part is summed
    only once, in ring order, so all replicas have the same bits.

    Steps: 2 (N - 1). Sent: 2 n (N - 1) / N, the minimum, by every replica at the same time. If the ranks of a host are
    consecutive, only one link enters the host and one leaves it. Suited to large vectors.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
    """
    size, rank = collectives.size, collectives.static_rank
    next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size
    parts = tf.split(pad_to_multiple(vector, size), size)
    for step in range(size - 1):
        tag = f"{name}/reduce{step}"
        collectives.send([parts[(rank - step) % size]], next_rank, tag=tag)
        index = (rank - step - 1) % size
        parts[index] = receive(collectives, parts[index], previous_rank, tag) + parts[index]
    for step in range(size - 1):
        tag = f"{name}/gather{step}"
        collectives.send([parts[(rank + 1 - step) % size]], next_rank, tag=tag)
        index = (rank - step) % size
        parts[index] = receive(collectives, parts[index], previous_rank, tag)
    return tf.concat(parts, 0)[: vector.shape[0]]


def ring_groups(topology: Topology) -> list[tuple[int, ...]]:
    """Returns the pairs of neighbors on the ring."""
    size = topology.size
    return [tuple(sorted((rank, (rank + 1) % size))) for rank in range(size)]


class Algorithm(NamedTuple):
    """A way to sum a vector over all replicas.

    Attributes:
      sum: takes the collectives of all replicas, this replica's vector, the topology of the replicas, and a name; returns the
        sum, with the same bits on every replica.
      groups: returns the groups of ranks that communicate; a group may be repeated.
    """

    sum: Callable[[Collectives, tf.Tensor, Topology, str], tf.Tensor]
    groups: Callable[[Topology], list[tuple[int, ...]]]


CATALOG: Mapping[str, Algorithm] = {
    "ring": Algorithm(ring, ring_groups),
    "tree": Algorithm(tree, tree_groups),
    "halving_doubling": Algorithm(halving_doubling, tree_groups),
    "hierarchical": Algorithm(hierarchical, hierarchical_groups),
}


def groups_of(names: Iterable[str], topology: Topology) -> list[tuple[int, ...]]:
    """Returns the groups of ranks that the named algorithms need, in the same order on every process."""
    groups = {group for name in names if name in CATALOG for group in CATALOG[name].groups(topology)}
    return sorted(group for group in groups if len(group) > 1)


class TunedCollectives(ForwardingCollectives):
    """Collectives that sum and average floating-point tensors with static shapes by other algorithms, inside `tf.function`.

    Tensors of a call with the same dtype are sent as one message. The engine executes all other calls: other operations and
    dtypes, sizes that may change from step to step, and eager calls, in which dependent messages would deadlock. All
    replicas choose the same algorithm, because shapes and dtypes are equal.

    Attributes:
      topology: the hosts of the replicas.
      table: the algorithm for each range of sizes in bytes.
      is_measured: whether a measured table will replace this table.
    """

    def __init__(self, engine: Collectives, topology: Topology, table: AlgorithmTable, *, is_measured: bool = False):
        super().__init__(engine)
        self.topology = topology
        self.table = table
        self.is_measured = is_measured

    def with_table(self, table: AlgorithmTable) -> "TunedCollectives":
        """Returns a copy with another table of algorithms."""
        return TunedCollectives(self._inner, self.topology, table, is_measured=self.is_measured)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class. The cost depends on the algorithm."""
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        supported = [i for i, tensor in enumerate(tensors) if self._is_supported(tensor, op)]
        results: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(tensors[i].dtype for i in supported):
            members = [i for i in supported if tensors[i].dtype == dtype]
            dtype_tensors = [tensors[i] for i in members]
            elements = sum(tensor.shape.num_elements() for tensor in dtype_tensors)
            algorithm = self.table.algorithm_for(elements * dtype.size)
            if algorithm != ENGINE:
                # TensorFlow rejects a message of a different size with the same name, even of another function.
                totals = self._sum(algorithm, dtype_tensors, op, f"{name}/{algorithm}/{dtype.name}_{elements}")
                results |= zip(members, totals, strict=True)
        remaining = [i for i in range(len(tensors)) if i not in results]
        if remaining:
            totals = self._inner.all_reduce([tensors[i] for i in remaining], op, name=name)
            results |= zip(remaining, totals, strict=True)
        return [results[i] for i in range(len(tensors))]

    def _is_supported(self, tensor: tf.Tensor, op: Op) -> bool:
        dtypes = self.dtypes.reducible & self.dtypes.gatherable
        is_supported = tensor.dtype.is_floating and tensor.dtype in dtypes and op != "max"
        return is_supported and tensor.shape.is_fully_defined() and not tf.executing_eagerly()

    def _sum(self, algorithm: str, tensors: Sequence[tf.Tensor], op: Op, name: str) -> list[tf.Tensor]:
        with tf.name_scope(algorithm):  # in profiles
            vectors = [tf.reshape(tensor, [-1]) for tensor in tensors]
            vector = vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0)
            total = CATALOG[algorithm].sum(self._inner, vector, self.topology, name)
            if op == "mean":
                total /= tf.cast(self.size, total.dtype)
            parts = tf.split(total, [tensor.shape.num_elements() for tensor in tensors])
            return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def possible_algorithms(topology: Topology) -> tuple[str, ...]:
    """Returns the names of the algorithms that are possible on these hosts, with the engine's algorithm first."""
    return tuple(name for name in ALGORITHMS if name != "hierarchical" or _has_levels(topology))


def check_algorithm(name: str, topology: Topology) -> None:
    """Raises `InputError` for "hierarchical" unless there are several hosts with the same number of replicas, at least 2."""
    if name == "hierarchical" and not _has_levels(topology):
        raise InputError(
            "--all_reduce=hierarchical needs several hosts with the same number of replicas, at least 2. Received: "
            f"hosts with {topology} replicas. Pass --topology, such as 2,2, or use another algorithm."
        )


def _has_levels(topology: Topology) -> bool:
    counts = [len(topology.ranks_of(host)) for host in range(topology.hosts)]
    return 1 < topology.hosts < topology.size and len({*counts}) == 1
