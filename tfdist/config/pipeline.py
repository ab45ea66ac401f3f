"""Parses and checks the options of pipelines. Does not import TensorFlow."""

import dataclasses
from typing import Any, ClassVar

from tfdist.config.fields import ANY_TEXT, AUTO, strategy_option
from tfdist.config.layouts import check_axes
from tfdist.config.mesh import Mesh
from tfdist.config.parameters import Parameters, boolean, choice, integer, parse_kind
from tfdist.errors import InputError

MEASURES = ("time", "parameters", "memory")


@dataclasses.dataclass(frozen=True)
class BalancedCut(Parameters):
    """A cut into stages of about equal cost."""

    name: ClassVar[str] = "balanced"
    # Measure of the cost: "time" of a forward and a backward pass, "parameters" for the bytes of the variables, or
    # "memory" for the bytes of variables and activations.
    by: str = choice("memory", MEASURES)


@dataclasses.dataclass(frozen=True)
class LayerCut:
    """A cut after the named layers."""

    names: tuple[str, ...]  # name of the last layer of each stage, except for the last stage

    def __str__(self) -> str:
        return ",".join(self.names)


def parse_cut(text: str) -> BalancedCut | LayerCut:
    """Parses `auto`, `balanced(by=time)`, or names of layers, separated by commas.

    `auto` is `balanced(by=memory)`, which does not depend on measurements.
    """
    text = text.strip()
    if text == AUTO:
        return BalancedCut()
    if text.partition("(")[0].strip() == "balanced":
        return parse_kind(text, {BalancedCut.name: BalancedCut}, "cut", words=["by"])
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or "(" in text:
        raise InputError(
            f"A cut must be auto, balanced(by=memory), or the names of layers after which stages end. Received: {text!r}. "
            "Write block_1_add,block_3_add for three stages."
        )
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise InputError(f"A cut must name different layers. Received: {duplicate} twice, in {text!r}. Remove one.")
    return LayerCut(names)


class PipelineSchedule(Parameters):
    """Base class of schedules; the fields of subclasses are the parameters in the flag."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPipe(PipelineSchedule):
    """All forward passes, then all backward passes (Huang et al., arXiv:1811.06965)."""

    name: ClassVar[str] = "gpipe"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneFOneB(PipelineSchedule):
    """One forward pass, one backward pass (Harlap et al., arXiv:1806.03377; flushed: Narayanan et al., arXiv:2104.04473)."""

    name: ClassVar[str] = "1f1b"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interleaved(PipelineSchedule):
    """1F1B with several model chunks per process (Narayanan et al., arXiv:2104.04473)."""

    name: ClassVar[str] = "interleaved"

    chunks: int = integer(2, 2, "parts of the model in each process")  # number of chunks per process, at least 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZBH1(PipelineSchedule):
    """Zero-bubble H1: weight gradients fill the bubble of 1F1B (Qi et al., arXiv:2401.10241)."""

    name: ClassVar[str] = "zb_h1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeDream(PipelineSchedule):
    """1F1B without a flush; gradients are computed with older weights (Narayanan et al., SOSP 2019)."""

    name: ClassVar[str] = "pipedream"

    vertical_sync: bool = boolean(False)  # whether all stages use weights of the same version for a batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoBW(PipelineSchedule):
    """1F1B without a flush; gradients are one update old (Narayanan et al., arXiv:2006.09503)."""

    name: ClassVar[str] = "2bw"


SCHEDULE_CLASSES: dict[str, type[PipelineSchedule]] = {
    kind.name: kind for kind in (GPipe, OneFOneB, Interleaved, ZBH1, PipeDream, TwoBW)
}
NO_FLUSH_SCHEDULES = (PipeDream, TwoBW)


def parse_pipeline_schedule(text: str) -> PipelineSchedule:
    """Parses the value of `--pipeline_schedule`, such as `1f1b` or `interleaved(chunks=2)`."""
    return parse_kind(text, SCHEDULE_CLASSES, "pipeline schedule")


DEFAULT_SCHEDULE = OneFOneB.name
ACTIVATION_COMPRESSION = ("none", "bf16", "fp16", "int8")

# By option that requires a flush at the end of each step: the rule and the remedy, for schedules without one.
_FLUSH_RULES = {
    "clip_norm": "Stages are updated before the norm of all gradients is known: leave out --clip_norm",
    "loss_scale": "A loss scale skips a step in all stages, but stages are updated one after the other: use "
    "--precision=mixed_bfloat16",
    "shared": "Stages are updated one after the other, and a variable of several stages would differ between them: "
    "untie it",
    "shard": "Stages are updated inside the loop of steps: leave out --shard",
    "activation_compression": "Schedules without a flush cannot compress messages: leave out --activation_compression",
    "find": "A search needs gradients of the newest weights: search with another --pipeline_schedule",
}


def check_without_flush(schedule: str, **options: Any) -> None:
    """Raises `InputError` for an option that a schedule without a flush does not support.

    `options` are values of flags; also `loss_scale`, the flag that scales the loss, and `shared`, the path of a
    variable of several stages. Empty values, 0 and "none" are accepted.
    """
    parsed_schedule = parse_pipeline_schedule(schedule)
    if not isinstance(parsed_schedule, NO_FLUSH_SCHEDULES):
        return
    for name, rule in _FLUSH_RULES.items():
        value = options.get(name)
        if value and value != "none":
            received = value if name in ("loss_scale", "shared") else f"--{name}={value}"
            raise InputError(f"{rule}, or use 1f1b. Received: {received} --pipeline_schedule={parsed_schedule}.")


def check_pipeline(config: Any) -> None:
    """Raises `InputError` unless `--mesh_shape` and `--layout` describe a pipeline and all flags match the schedule."""
    flags = {name: getattr(config, name, "") for name in _FLUSH_RULES}
    if getattr(config, "precision", "") == "mixed_float16":
        flags["loss_scale"] = "--precision=mixed_float16"
    check_without_flush(config.pipeline_schedule, **flags)
    if config.layout == AUTO:
        raise InputError(
            "--layout=auto is for --strategy=mesh: for a pipeline, name the dims that the model axis shards, for example "
            "--layout=heads:model;ffn:model. Received: --layout=auto --strategy=pipeline."
        )
    mesh = config.parsed.mesh_shape or Mesh({})  # as many stages as processes
    check_axes(mesh, config.layout)
    if mesh.axes.get("model", 1) > 1:
        check_model_axis(shard=config.shard, schedule=config.pipeline_schedule)
        if getattr(config, "batch_norm", "local") == "synchronized" and mesh.axes.get("data", 1) > 1:
            raise InputError(
                "A layer that is sharded over the mesh axis `model` cannot communicate with other replicas: use "
                "--batch_norm=local, or leave out the model or data axis. Received: --batch_norm=synchronized "
                f"--mesh_shape={mesh}."
            )


def check_model_axis(shard: str = "none", schedule: str = DEFAULT_SCHEDULE) -> None:
    """Raises `InputError` for options that a pipeline with a model axis does not support."""
    if isinstance(parse_pipeline_schedule(schedule), NO_FLUSH_SCHEDULES):
        raise InputError(
            "Older weights are not kept in a pipeline with a model axis: use another --pipeline_schedule, such as 1f1b. "
            f"Received: --pipeline_schedule={schedule}."
        )
    if shard != "none":
        raise InputError(
            "The optimizer's state is not sharded over replicas in a pipeline with a model axis: leave out --shard. Received: "
            f"--shard={shard}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of pipelines."""

    pipeline_schedule: str = strategy_option(
        DEFAULT_SCHEDULE,
        "Pipeline schedule, the order of forward and backward passes, for --strategy=pipeline: gpipe, 1f1b, "
        "interleaved(chunks=2), zb_h1, pipedream, pipedream(vertical_sync=True) or 2bw (docs/guides/pipelines.md).",
        parse=parse_pipeline_schedule,
        safe_values=ANY_TEXT,
    )
    micro_batches: int = strategy_option(
        1, "Number of micro-batches into which each replica splits its rows, for --strategy=pipeline.", minimum=1
    )
    cut: str = strategy_option(
        "auto",
        "Where --strategy=pipeline cuts the model: auto, names of layers after which a stage ends, such as block1,block3, or "
        "balanced(by=parameters), by=memory or by=time.",
        check=str,
        parse=parse_cut,
        safe_values=ANY_TEXT,
    )
    activation_compression: str = strategy_option(
        "none",
        "Compression of activations and their gradients between the stages of --strategy=pipeline in training: none, bf16 or "
        "fp16 (casts to 2 bytes), or int8 (1 byte, with a scale per block of 256 elements).",
        choices=ACTIVATION_COMPRESSION,
    )
