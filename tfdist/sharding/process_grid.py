"""The processes of a pipelined job as a grid: each has a stage and, in it, an index among the replicas of the data.

The devices of a process are the axis `model`.
"""

import dataclasses
import itertools

from tfdist.errors import InputError
from tfdist.sharding.layouts import split_rules
from tfdist.sharding.mesh import Mesh, parse_mesh

_AXES = ("stage", "data", "model")


@dataclasses.dataclass(frozen=True)
class ProcessGrid:
    """The axes `stage` and `data` over the processes of a job; ranks are adjacent along `data`, as in Megatron.

    Attributes:
      stages: number of stages.
      replicas: number of pipelines, each of which has its own rows of a batch.
      devices: number of devices of each process, over which its layers are spread.
    """

    stages: int
    replicas: int
    devices: int = 1

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


def check_axes(mesh: Mesh, layout: str = "") -> None:
    """Raises `InputError` unless these are the axes of a pipeline, with rules for the axis model if it has several devices.

    Args:
      mesh: axes of `--mesh_shape`.
      layout: value of `--layout`.
    """
    others = [axis for axis in mesh.axes if axis not in _AXES]
    if others:
        raise InputError(
            f"The axes of a pipeline are stage, data and model. Received: {others[0]} in --mesh_shape={mesh}. Leave it out, or "
            "use --strategy=mesh, which shards layers over devices."
        )
    ordered = {axis: mesh.axes[axis] for axis in _AXES if axis in mesh.axes}
    if list(mesh.axes) != list(ordered):
        raise InputError(
            "The axes of a pipeline must be in the order stage, data, model, so that the ranks of a stage are adjacent. "
            f'Received: --mesh_shape={mesh}. Write "{Mesh(ordered)}".'
        )
    strange = [f"{dim}:{axis}" for dim, axis in split_rules(layout).items() if axis != "model" or dim == "batch"]
    if strange:
        raise InputError(
            "The --layout of a pipeline shards dims of layers over the axis model; rows belong to the axis data. Received: "
            f"{strange[0]} in --layout={layout}. Write for example heads:model;ffn:model."
        )
    if mesh.axes.get("model", 1) > 1 and not split_rules(layout):
        raise InputError(
            "An axis model needs rules for what is sharded over it. Received: "
            f"--mesh_shape={mesh} without --layout. Add for example --layout=heads:model;ffn:model."
        )
    if "model" not in mesh.axes and split_rules(layout):
        raise InputError(
            "The --layout of a pipeline needs an axis model in --mesh_shape. Received: "
            f"--layout={layout} --mesh_shape={mesh}. Add for example {mesh};model:2."
        )


def parse_grid(mesh_shape: str, processes: int, layout: str = "") -> ProcessGrid:
    """Returns the grid of `--mesh_shape`, such as "stage:2;data:2"; by default, each process is a stage.

    Args:
      mesh_shape: sizes of the axes stage, data and model, each optional.
      processes: number of processes of the job.
      layout: value of `--layout`.

    Raises:
      InputError: there are other axes, or the sizes of stage and data do not multiply to the number of processes.
    """
    mesh = parse_mesh(mesh_shape) if mesh_shape else Mesh({"stage": processes})
    check_axes(mesh, layout)
    devices = mesh.axes.get("model", 1)
    if mesh.size != processes * devices:
        what = "The axes of --mesh_shape" if devices == 1 else "The axes stage and data of --mesh_shape"
        raise InputError(
            f"{what} must multiply to the number of processes. Received: {mesh} with {processes} "
            f"process{'es' * (processes != 1)}. Start {mesh.size // devices}, or change --mesh_shape."
        )
    return ProcessGrid(mesh.axes.get("stage", 1), mesh.axes.get("data", 1), devices)
