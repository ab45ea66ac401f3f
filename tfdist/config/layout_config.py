"""The configuration of `tfdist layout`."""

import dataclasses
from typing import ClassVar

from tfdist.config.conflicts import conflict_error
from tfdist.config.fields import AUTO, device_flag, normalize_layout, strategy_option
from tfdist.config.strategy_registry import strategies_with
from tfdist.config.train_config import TrainConfig

_PIPELINE_STRATEGIES = strategies_with("pipeline_schedule")
_LAYOUT_STRATEGIES = tuple(name for name in strategies_with("layout") if name not in _PIPELINE_STRATEGIES)
_SERVER_STRATEGIES = strategies_with("servers")
_REPLICA_STRATEGIES = tuple(name for name in strategies_with("shard") if name not in strategies_with("layout"))
_PROCESS_STRATEGIES = (*_REPLICA_STRATEGIES, *_SERVER_STRATEGIES)
_STRATEGIES = (*_LAYOUT_STRATEGIES, *_PIPELINE_STRATEGIES, *_PROCESS_STRATEGIES)
_PLAN_FLAGS = (  # flags that affect the memory and communication of a step
    "model dataset data_dir batch_size optimizer learning_rate momentum_correction precision accumulate_steps recompute ema"
    " strategy devices mesh_shape layout shard shard_axis shard_min_elements pipeline_schedule micro_batches cut"
    " activation_compression intra_op_threads servers staleness shard_variables min_table_bytes"
).split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutConfig(TrainConfig):
    """Configuration of `tfdist layout`: the training flags, for strategies that split a model or its state."""

    ignored_flags: ClassVar[tuple[str, ...]] = tuple(
        field.name for field in dataclasses.fields(TrainConfig) if field.name not in _PLAN_FLAGS
    )
    strategy: str = device_flag(
        AUTO,
        f"Distribution strategy: {', '.join(_STRATEGIES)}, or auto: {_PIPELINE_STRATEGIES[0]} if --mesh_shape has an axis "
        f"stage, else {_LAYOUT_STRATEGIES[0]}.",
        choices=(AUTO, *_STRATEGIES),
    )
    layout: str = strategy_option(
        "",
        "As for training; auto searches for the layout that communicates least and fits into --memory_gb.",
        check=lambda text: text if text == AUTO else normalize_layout(text),
    )
    memory_gb: float = device_flag(0.0, "Memory per device in GiB for state and activations, for --layout=auto.")
    measure_stages: bool = device_flag(
        False, "Measure the time of each stage of a pipeline on this device, and predict the time of a step."
    )
    processes: int = device_flag(
        0, f"Number of training processes, each with one replica, for --strategy={' or '.join(_PROCESS_STRATEGIES)}."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.strategy in _PROCESS_STRATEGIES) != bool(self.processes):
            raise conflict_error(
                "A plan for replicas needs their number of processes: specify both --strategy="
                f"{' or '.join(_PROCESS_STRATEGIES)} and --processes or neither.",
                self,
                ("strategy", "processes"),
            )
        if self.has_stages and not (self.mesh_shape and "stage" in self.parsed.mesh_shape.axes):
            rule = "A plan for a pipeline needs its number of stages: specify --mesh_shape with an axis stage, such as stage:4."
            raise conflict_error(rule, self, ("mesh_shape", "strategy"))
        if self.measure_stages and not self.has_stages:
            rule = "Only a pipeline has stages: add --mesh_shape=stage:4, for example, or leave out --measure_stages."
            raise conflict_error(rule, self, ("strategy", "measure_stages"))
        if (self.layout == AUTO) != bool(self.memory_gb):
            rule = "A search for a layout needs a memory limit: specify both --layout=auto and --memory_gb or neither."
            raise conflict_error(rule, self, ("layout", "memory_gb"))

    @property
    def has_stages(self) -> bool:
        """Whether the plan is for a pipeline."""
        return self.strategy in _PIPELINE_STRATEGIES

    @property
    def has_servers(self) -> bool:
        """Whether the plan is for parameter servers."""
        return self.strategy in _SERVER_STRATEGIES

    @property
    def has_replicas(self) -> bool:
        """Whether the plan is for replicas in separate processes, each with the whole model."""
        return self.strategy in _REPLICA_STRATEGIES

    def _complete(self) -> None:
        super()._complete()
        if self.strategy == AUTO:
            is_pipeline = bool(self.mesh_shape) and "stage" in self.parsed.mesh_shape.axes
            object.__setattr__(self, "strategy", (_PIPELINE_STRATEGIES if is_pipeline else _LAYOUT_STRATEGIES)[0])
