"""The processes of a pipelined job as a grid: each has a stage and, in it, an index among the replicas of the data."""

import dataclasses
import itertools

from tfdist.errors import InputError
from tfdist.sharding.mesh import Mesh, parse_mesh

_AXES = ("stage", "data")


@dataclasses.dataclass(frozen=True)
class ProcessGrid:
    """The axes `stage` and `data` over the processes of a job; ranks are adjacent along `data`, as in Megatron.

    Attributes:
      stages: number of stages.
      replicas: number of pipelines, each of which has its own rows of a batch.
    """

    stages: int
    replicas: int

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Returns the stage and the replica of a rank."""
        return divmod(rank, self.replicas)

    def role(self, rank: int) -> str:
        """Returns what a rank does, for messages, such as `stage 1` or, with several pipelines, `stage 1, replica 0`."""
        stage, replica = self.coordinates(rank)
        return f"stage {stage}" + (f", replica {replica}" if self.replicas > 1 else "")

    def ranks_of_stage(self, stage: int) -> list[int]:
        """Returns the ranks that hold a stage, in the order of their replicas; they reduce its gradients."""
        return [stage * self.replicas + replica for replica in range(self.replicas)]

    def ranks_of_replica(self, replica: int) -> list[int]:
        """Returns the ranks of one pipeline, in the order of their stages; neighbours exchange activations."""
        return [stage * self.replicas + replica for stage in range(self.stages)]

    def groups(self) -> list[list[int]]:
        """Returns all sets of ranks that communicate, which engines need to know when they start.

        Any two stages of a pipeline may exchange messages: neighbours activations, stages with tied weights their gradients.
        """
        pipelines = [self.ranks_of_replica(replica) for replica in range(self.replicas)]
        pairs = [list(pair) for ranks in pipelines for pair in itertools.combinations(ranks, 2)]
        return [*map(self.ranks_of_stage, range(self.stages)), *pipelines, *pairs]


def check_axes(mesh: Mesh) -> None:
    """Raises `InputError` unless these are the axes of a pipeline."""
    others = [axis for axis in mesh.axes if axis not in _AXES]
    if others:
        raise InputError(
            f"The axes of a pipeline are stage and data. Received: {others[0]} in --mesh_shape={mesh}. Leave it out, or use "
            "--strategy=mesh, which shards layers over devices."
        )
    if list(mesh.axes) == ["data", "stage"]:
        raise InputError(
            f"The axis stage must come before data, so that the ranks of a stage are adjacent. Received: --mesh_shape={mesh}. "
            f'Write "stage:{mesh.axes["stage"]};data:{mesh.axes["data"]}".'
        )


def parse_grid(mesh_shape: str, processes: int) -> ProcessGrid:
    """Returns the grid of `--mesh_shape`, such as "stage:2;data:2"; by default, each process is a stage.

    Args:
      mesh_shape: sizes of the axes stage and data, each optional.
      processes: number of processes of the job.

    Raises:
      InputError: there are other axes, or the sizes do not multiply to the number of processes.
    """
    mesh = parse_mesh(mesh_shape) if mesh_shape else Mesh({"stage": processes})
    check_axes(mesh)
    if mesh.size != processes:
        raise InputError(
            f"The axes of --mesh_shape must multiply to the number of processes. Received: {mesh} with {processes} "
            f"process{'es' * (processes != 1)}. Start {mesh.size}, or change --mesh_shape."
        )
    return ProcessGrid(mesh.axes.get("stage", 1), mesh.axes.get("data", 1))
