"""Layouts, which map named dims of tensors to mesh axes, and grids of processes. Does not import TensorFlow.

A rule such as `heads:model` applies to every tensor with a dim of that name. Dims without a rule are replicated.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence

from tfdist.config.mesh import Mesh, parse_mesh
from tfdist.errors import InputError, nearest

_RULE = re.compile(r"\s*([A-Za-z_]\w*)\s*:\s*([A-Za-z_]\w*)\s*")
_GRAMMAR = 'A layout is a list of DIM:AXIS separated by ;, such as "batch:data;heads:model"'


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of one tensor on a mesh."""

    axes: tuple[str | None, ...]  # for each dim, the axis over which it is sharded, or None if it is replicated

    @classmethod
    def replicated(cls, rank: int) -> "Layout":
        """Returns the fully replicated layout of a tensor with `rank` dims."""
        return cls((None,) * rank)

    def shard_count(self, mesh: Mesh) -> int:
        """Returns the number of different shards of the tensor."""
        return math.prod(mesh.axes[axis] for axis in self.axes if axis)

    def __str__(self) -> str:
        """Returns the axes, with * for replicated dims, such as `*,model`."""
        return ",".join(axis or "*" for axis in self.axes)


STAGES = ("none", "optimizer", "gradients", "parameters")
REPLICA_STAGES = STAGES[:2]  # the stages that are supported with one replica per process


@dataclasses.dataclass(frozen=True)
class Shard:
    """The state to shard over a mesh axis instead of replicating it: stages 1, 2 and 3 of ZeRO.

    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020 (arXiv:1910.02054).
    """

    # "none", "optimizer" (optimizer state), "gradients" (also gradients) or "parameters" (also parameters).
    stage: str = "none"
    axis: str = ""  # axis of the mesh
    min_elements: int = 1024  # variables with fewer elements are not sharded

    @property
    def combines_all_reduces(self) -> bool:
        """Whether all gradients may exist at the same time and can be sent in one message."""
        return self.stage in ("none", "optimizer")


def parse_shard(stage: str, axis: str, min_elements: int, mesh: Mesh) -> Shard:
    """Creates a `Shard` from `--shard` and related flags; raises `InputError` if the stage or axis does not exist."""
    if stage not in STAGES:
        raise InputError(f"--shard={stage} is not known.{nearest(stage, STAGES)}")
    mesh.size_of(axis)
    return Shard(stage, axis, min_elements)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Layouts of a variable and its associated tensors on a mesh."""

    computation: Layout  # layout in the forward and backward pass
    storage: Layout  # layout between steps
    gradient: Layout  # layout of the gradient between the backward pass and the update
    slots: Layout  # layout of the optimizer's state, in which the update is computed

    @classmethod
    def uniform(cls, layout: Layout) -> "Placement":
        """Returns a placement that uses one layout for all tensors."""
        return cls(layout, layout, layout, layout)

    @property
    def is_gathered(self) -> bool:
        """Whether the variable's shards are gathered before it is used."""
        return self.storage != self.computation


def shard_placement(layout: Layout, shape: Sequence[int], mesh: Mesh, shard: Shard) -> Placement:
    """Adds the sharding of `shard` to a layout, over a replicated dim whose size is a multiple of the axis, if any.

    Prefers other dims to the first one: TensorFlow's slice along the first dim is a view, which keeps the whole tensor in
    memory.
    """
    sharded_layout = Layout(layout.axes if shard.stage == "none" else _add_axis(layout.axes, shape, mesh, shard))
    layouts = {
        stage: sharded_layout if STAGES.index(shard.stage) >= STAGES.index(stage) else layout for stage in STAGES
    }
    return Placement(layout, layouts["parameters"], layouts["gradients"], layouts["optimizer"])


def _add_axis(axes: tuple[str | None, ...], shape: Sequence[int], mesh: Mesh, shard: Shard) -> tuple[str | None, ...]:
    if not mesh.splits(shard.axis) or shard.axis in axes or math.prod(shape) < shard.min_elements:
        return axes
    size = mesh.axes[shard.axis]
    for i in (*range(1, len(shape)), 0)[: len(shape)]:
        if not mesh.splits(axes[i]) and shape[i] % size == 0:
            return (*axes[:i], shard.axis, *axes[i + 1 :])
    return axes


def replication_reason(shape: Sequence[int], trainable: bool, slots: int, mesh: Mesh, shard: Shard) -> str:
    """Returns the reason why `shard_placement` does not shard a variable without a rule."""
    if shard.stage == "none" or not mesh.splits(shard.axis):
        return "no rule for its dims"
    if not trainable:
        return "not trainable"
    if not slots and shard.stage == "optimizer":
        return "without optimizer state"
    if math.prod(shape) < shard.min_elements:
        return f"fewer than {shard.min_elements} elements (--shard_min_elements)"
    return f"no dim that is divisible by the {mesh.axes[shard.axis]} devices of {shard.axis}"


def parse_layout(text: str, mesh: Mesh) -> dict[str, str]:
    """Parses `--layout`, such as "batch:data;heads:model"; by default, batch is sharded over the first axis."""
    rules = split_rules(text)
    for axis in rules.values():
        mesh.size_of(axis)
    return {"batch": next(iter(mesh.axes))} | rules


def split_rules(text: str) -> dict[str, str]:
    """Parses the rules without checking them against a mesh; returns axis by dim; see `parse_layout`."""
    rules: dict[str, str] = {}
    for part in filter(str.strip, text.split(";")):
        match = _RULE.fullmatch(part)
        if not match:
            raise InputError(f"{_GRAMMAR}. Received: {part.strip()!r} in {text!r}.")
        dim, axis = match.groups()
        if rules.get(dim, axis) != axis:
            raise InputError(f"{_GRAMMAR}, each dim once. Received: {dim} on {rules[dim]} and on {axis} in {text!r}.")
        rules[dim] = axis
    return rules


def rules_text(rules: Mapping[str, str]) -> str:
    """Returns the rules in the form of `--layout`."""
    return ";".join(f"{dim}:{axis}" for dim, axis in rules.items())


def layout_by_rules(
    name: str,
    dims: Sequence[str | None],
    shape: Sequence[int],
    rules: Mapping[str, str],
    mesh: Mesh,
    lenient: Sequence[str] = (),
) -> Layout:
    """Applies rules to one tensor, with the name of each dim, None for dims that are always replicated.

    `lenient` dims are replicated if their size is not a multiple of their axis. `name` is used only in error messages.

    Raises:
      InputError: two dims are mapped to one axis, or the size of a dim is not a multiple of its axis.
    """
    axes = tuple(rules.get(dim) if dim else None for dim in dims)
    axes = tuple(
        None if axis and dim in lenient and size % mesh.axes[axis] else axis
        for axis, dim, size in zip(axes, dims, shape, strict=True)
    )
    for i, axis in enumerate(axes):
        if axis is None:
            continue
        if axis in axes[:i]:
            first_dim = dims[axes.index(axis)]
            raise InputError(
                f"--layout puts {first_dim} and {dims[i]} of {name} on the axis {axis}; an axis can shard only one dim of "
                "a tensor. Remove one rule, or rename a dim (tfdist.name_dims for weights, tfdist.constrain for "
                "activations)."
            )
        if shape[i] % mesh.axes[axis]:
            raise InputError(
                f"--layout shards {dims[i]} of {name} over the {mesh.axes[axis]} devices of {axis}, whose number must "
                f"divide its size. Received: {dims[i]} of size {shape[i]}. Change the rule, the mesh or the model."
            )
    return Layout(axes)


def resolve_optional_dims(dims: Sequence[str | None], rules: Mapping[str, str]) -> list[str | None]:
    """Removes the suffix ? from dim names; a dim with ? becomes None if another dim is mapped to the same axis."""
    axes = {rules[dim] for dim in dims if dim and dim in rules}
    names: list[str | None] = []
    for dim in dims:
        name = dim and dim.removesuffix("?")
        names.append(None if name and name != dim and rules.get(name) in axes else name)
    return names


def unused_rule_warnings(rules: Mapping[str, str], dims: Collection[str], shard: Shard, mesh: Mesh) -> list[str]:
    """Returns a warning for each rule without effect and each unused axis."""
    used_axes = {axis for dim, axis in rules.items() if dim in dims or dim == "batch"}
    used_axes |= {shard.axis} if shard.stage != "none" else set()
    return [
        *(
            f"The rule {dim}:{axis} has no effect: no tensor of the model has a dim {dim}.{nearest(dim, sorted(dims))}"
            for dim, axis in rules.items()
            if dim not in dims and dim != "batch"
        ),
        *(
            f"Nothing is sharded over the axis {axis}: its {size} devices do the same work."
            for axis, size in mesh.axes.items()
            if size > 1 and axis not in used_axes
        ),
    ]


# The processes of a pipeline form a grid: each computes a stage of the model for one replica of the data.
# The devices of a process form the axis `model`.

_AXES = ("stage", "data", "model")


@dataclasses.dataclass(frozen=True)
class ProcessGrid:
    """The axes `stage` and `data` over the processes of a job; ranks are adjacent along `data`, as in Megatron."""

    stages: int
    replicas: int  # number of pipelines; each has its own rows of a batch
    devices: int = 1  # number of devices of each process, over which its layers are sharded

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Returns the stage and the replica of a rank."""
        return divmod(rank, self.replicas)

    def role(self, rank: int) -> str:
        """Returns the role of a rank as text: `stage 1` or, with several pipelines, `stage 1, replica 0`."""
        stage, replica = self.coordinates(rank)
        return f"stage {stage}" + (f", replica {replica}" if self.replicas > 1 else "")

    def ranks_of_stage(self, stage: int) -> list[int]:
        """Returns the ranks that hold a stage, in the order of their replicas; they reduce its gradients."""
        return [stage * self.replicas + replica for replica in range(self.replicas)]

    def ranks_of_replica(self, replica: int) -> list[int]:
        """Returns the ranks of one pipeline, in the order of their stages; neighbors exchange activations."""
        return [stage * self.replicas + replica for stage in range(self.stages)]

    def groups(self) -> list[list[int]]:
        """Returns all sets of ranks that communicate, which engines need at startup.

        Any two stages of a pipeline may exchange messages: neighbors exchange activations, stages with tied weights gradients.
        """
        pipelines = [self.ranks_of_replica(replica) for replica in range(self.replicas)]
        pairs = [list(pair) for ranks in pipelines for pair in itertools.combinations(ranks, 2)]
        return [*map(self.ranks_of_stage, range(self.stages)), *pipelines, *pairs]


def check_axes(mesh: Mesh, layout: str = "") -> None:
    """Raises `InputError` unless a mesh and a `--layout` are valid for a pipeline."""
    if list(mesh.axes) != [axis for axis in _AXES if axis in mesh.axes]:  # so that the ranks of a stage are adjacent
        raise InputError(
            f"The axes of a pipeline are stage, data and model, in this order. Received: --mesh_shape={mesh}. For "
            "example, pass stage:2;data:2, or use --strategy=mesh, which shards layers over devices."
        )
    misplaced_rules = [
        f"{dim}:{axis}" for dim, axis in split_rules(layout).items() if axis != "model" or dim == "batch"
    ]
    if misplaced_rules:
        raise InputError(
            "The --layout of a pipeline shards dims of layers over the axis model; rows belong to the axis data. Received: "
            f"{misplaced_rules[0]} in --layout={layout}. For example, pass heads:model;ffn:model."
        )
    has_axis, has_rules = mesh.axes.get("model", 1) > 1, bool(split_rules(layout))
    if has_axis and not has_rules or has_rules and "model" not in mesh.axes:
        raise InputError(
            "In a pipeline, an axis model in --mesh_shape and rules for it in --layout require each other. "
            f"Received: --mesh_shape={mesh} --layout={layout}. For example, pass stage:2;model:2 and heads:model;ffn:model."
        )


def parse_grid(mesh_shape: str, processes: int, layout: str = "") -> ProcessGrid:
    """Returns the grid of `--mesh_shape`, such as "stage:2;data:2"; by default, each process of the job is a stage."""
    mesh = parse_mesh(mesh_shape) if mesh_shape else Mesh({"stage": processes})
    check_axes(mesh, layout)
    devices = mesh.axes.get("model", 1)
    if mesh.size != processes * devices:
        axes = "The axes of --mesh_shape" if devices == 1 else "The axes stage and data of --mesh_shape"
        raise InputError(
            f"{axes} must multiply to the number of processes. Received: {mesh} with {processes} "
            f"process{'es' * (processes != 1)}. Start {mesh.size // devices} processes, or change --mesh_shape."
        )
    return ProcessGrid(mesh.axes.get("stage", 1), mesh.axes.get("data", 1), devices)
