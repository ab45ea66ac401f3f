"""Trains in several processes with Horovod's collectives, but not with its Keras wrappers."""

from collections.abc import Callable, Sequence

import keras

from tfdist.cluster.devices import share_cores, use_one_gpu
from tfdist.cluster.environment import Cluster
from tfdist.coordination import Group
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError

try:
    import horovod.tensorflow as hvd
except ImportError as error:
    raise InputError(
        f"--strategy=horovod needs Horovod built for this TensorFlow. Received: {error}. Run `tfdist install_horovod`."
    ) from error

from tfdist.collectives.horovod import HorovodCollectives
from tfdist.collectives.interface import assign_from_first
from tfdist.collectives.process_groups import distinct_groups
from tfdist.distribution.all_reduce_plan import AllReducePlan, plan_all_reduce
from tfdist.distribution.horovod_rendezvous import describe_communication, start_horovod
from tfdist.distribution.sharded_optimizer import optimizer_shards


class Horovod(Strategy):
    """One replica per process, with ordinary variables that rank 0 broadcasts."""

    name = "horovod"

    def __init__(
        self,
        *,
        cluster: Cluster,
        join: Callable[[Cluster], Group],
        communication: str = "",
        intra_op_threads: int = 0,
        groups: Sequence[Sequence[int]] = (),
        all_reduce: str = "engine",
        topology: str = "",
        shard: str = "none",
    ):
        """Starts Horovod.

        `groups` are the sets of ranks that will communicate, including pairs that exchange messages, the same on every
        process. They become Horovod's process sets, which cannot be added later. The groups that the `all_reduce` algorithm
        needs are added. Other options are those of the flags, but an empty `communication` means the library set in the
        environment, or Gloo. With MPI, a collective waits forever for a lost rank: "auto" needs another way to end the process.
        """
        share_cores(cluster, intra_op_threads)
        use_one_gpu(cluster.local_rank)
        # Training limits its calls by --stall_shutdown_seconds. Horovod's own limit, for all collectives, is an hour unless
        # the environment sets HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
        sets: dict[tuple[int, ...], hvd.ProcessSet] = {}
        plans: list[AllReducePlan] = []

        def make_process_sets(group: Group | None) -> list[hvd.ProcessSet]:
            plans.append(plan_all_reduce(all_reduce, topology, group, cluster))
            rank_groups = distinct_groups([*groups, *plans[0].groups], cluster.size)
            sets.update({ranks: hvd.ProcessSet(ranks) for ranks in rank_groups})
            return list(sets.values())

        self.group = start_horovod(
            cluster, join, communication=communication, stall_seconds=3600, make_process_sets=make_process_sets
        )
        self.communication = describe_communication()
        self.cluster = cluster
        self.replicas = hvd.size()
        self.local_replicas = range(hvd.rank(), hvd.rank() + 1)
        self.collectives = HorovodCollectives(process_sets=sets)
        self.tuned_collectives = plans[0].tune(self.collectives)
        self.optimizer_shards = optimizer_shards(shard, self)

    def synchronize(self, variables: Sequence[keras.Variable]) -> None:
        assign_from_first(variables, self.collectives)

    def close(self) -> None:
        hvd.shutdown()


STRATEGY = Horovod
