"""Plans a pipeline: the variables and messages of each stage, and the idle time and memory of each schedule."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfdist import keras_internals
from tfdist.collectives.replica_context import ReplicaContextCollectives
from tfdist.config.layout_config import LayoutConfig
from tfdist.config.layouts import ProcessGrid
from tfdist.config.pipeline import check_without_flush
from tfdist.distribution.balanced_parts import sizes_of_parts
from tfdist.errors import InputError
from tfdist.pipelining.activation_compression import METHODS, message_bytes
from tfdist.pipelining.cutting import Cut, cut_model, trace_model
from tfdist.pipelining.operation_graph import AbstractRun, Graph
from tfdist.pipelining.operation_timing import measure_seconds
from tfdist.pipelining.schedule import Schedule
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.pipelining.stage_costs import count_operations, crossing_specs, measure_stage
from tfdist.pipelining.timeline import simulate
from tfdist.planning.layout_plan import AbstractModel

_REFERENCE_SCHEDULES = ("gpipe", "1f1b", "interleaved(chunks=2)", "zb_h1")


@dataclasses.dataclass(frozen=True)
class SentTensor:
    """A tensor that a stage sends to the next one for each micro-batch."""

    name: str  # name of the tensor
    shape: tuple[int, ...]  # its static shape
    dtype: str  # its element type
    bytes: int  # its size in a message
    has_gradient: bool  # whether its gradient, of the same size, is sent back


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """The plan of one stage."""

    first_layer: str  # name of its first layer call
    last_layer: str  # name of its last layer call; `--cut` after it reproduces this stage
    parameters: int  # number of elements of its trainable variables
    # Bytes on each device of its variables, of the gradients and the optimizer state of trainable ones, and, for each
    # micro-batch, of the activations that are kept for the backward pass, including received tensors.
    bytes: dict[str, int]
    reduced_bytes: int  # bytes of the full gradients, which are summed over replicas
    operations: int  # multiplications and additions of the forward pass of a micro-batch
    sent: tuple[SentTensor, ...]  # tensors that it sends to the next stage for each micro-batch
    forward_seconds: float | None  # measured time of the forward pass of a micro-batch; None if it was not measured
    backward_seconds: float | None  # measured time of the backward pass, or None

    @property
    def sent_bytes(self) -> int:
        """Bytes that it sends to the next stage for each micro-batch."""
        return sum(tensor.bytes for tensor in self.sent)


@dataclasses.dataclass(frozen=True)
class SchedulePlan:
    """The plan of one schedule."""

    schedule: str  # as in `--pipeline_schedule`
    idle: float  # fraction of the time in which processes do not compute, predicted from the costs of the stages
    # For each process, the largest number of micro-batches whose activations it keeps at the same time.
    live_micro_batches: tuple[int, ...]
    # For each process, bytes per device of variables, gradients, optimizer state, older weights and live activations;
    # of the replica with the largest part, if optimizer state is sharded over replicas.
    process_bytes: tuple[int, ...]
    # For each process, bytes of older weights, which schedules without a flush keep.
    older_weights_bytes: tuple[int, ...]
    # For each process, bytes that it sends to other stages in a step: activations, their gradients, and gradients of
    # shared variables.
    message_bytes: tuple[int, ...]
    step_seconds: float | None  # predicted time of all micro-batches; None if stages were not measured


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """The plan of a pipeline."""

    stages: tuple[StagePlan, ...]  # stages of the requested schedule
    shared: list[dict[str, Any]]  # path, bytes and stages of each variable that several of these stages use
    # For each process of the requested schedule, bytes of the optimizer state in each replica; a single size if it is not
    # sharded.
    optimizer_parts: tuple[tuple[int, ...], ...]
    schedules: tuple[SchedulePlan, ...]  # the requested schedule and others for comparison
    impossible_schedules: Mapping[str, str]  # by name of a schedule, why it cannot be used
    has_loops: bool  # whether there are loops, whose operations and activations are not counted


def plan_pipeline(
    abstract_model: AbstractModel,
    config: LayoutConfig,
    grid: ProcessGrid,
    rows: int,
    device_bytes: Callable[[keras.Variable], int] = keras_internals.bytes_of,
) -> PipelinePlan:
    """Plans a pipeline with one or more stages of a model in each process, for micro-batches of `rows`.

    `device_bytes` returns the bytes of a variable on each device of a process.

    Raises:
      InputError: the model cannot be cut in this way, the schedule cannot be used, or the state cannot be sharded.
    """
    shards = grid.replicas if config.shard == "optimizer" else 1
    planner = _Planner(trace_model(abstract_model.model), abstract_model.slots, rows, config, shards, device_bytes)
    schedule, processes, micro_batches = config.pipeline_schedule, grid.stages, config.micro_batches
    requested_schedule = make_schedule(schedule, processes, micro_batches)
    plans, impossible = {requested_schedule.name: planner.plan(requested_schedule)}, {}
    for name in _REFERENCE_SCHEDULES:
        try:
            compared_schedule = make_schedule(name, processes, micro_batches)
            plans.setdefault(compared_schedule.name, planner.plan(compared_schedule))
        except InputError as error:
            impossible[name] = str(error)
    stages = planner.stages(requested_schedule.stages)
    check_without_flush(requested_schedule.name, shared=next((variable.path for variable, _ in stages.cut.shared), ""))
    order = {name: index for index, name in enumerate(_REFERENCE_SCHEDULES)}
    sorted_plans = sorted(plans.values(), key=lambda plan: order.get(plan.schedule, -1))
    shared = [
        {"path": variable.path, "bytes": keras_internals.bytes_of(variable), "stages": stage_indices}
        for variable, stage_indices in stages.cut.shared
    ]
    parts = planner.optimizer_parts(requested_schedule)
    return PipelinePlan(stages.plans, shared, parts, tuple(sorted_plans), impossible, stages.has_loops)


def idle_and_makespan(schedule: Schedule, forward: Sequence[float], backward: Sequence[float]) -> tuple[float, float]:
    """Returns the fraction of idle time and the time of a step; in the steady state for schedules without a flush."""
    if schedule.has_flush:
        timeline = simulate(schedule, forward=forward, backward=backward)
        return timeline.bubble, timeline.makespan
    stage_seconds = [sum(pair) for pair in zip(forward, backward, strict=True)]
    return 1 - sum(stage_seconds) / len(stage_seconds) / max(stage_seconds), schedule.micro_batches * max(stage_seconds)


@dataclasses.dataclass(frozen=True)
class _Stages:
    cut: Cut
    plans: tuple[StagePlan, ...]
    has_loops: bool


@dataclasses.dataclass
class _Planner:
    """Plans schedules, which may need different numbers of stages."""

    model: AbstractRun
    slots: Mapping[int, int]
    rows: int
    config: LayoutConfig
    shards: int
    device_bytes: Callable[[keras.Variable], int]
    _stages_by_count: dict[int, _Stages] = dataclasses.field(default_factory=dict)
    _seconds: Callable[[Graph], Sequence[float]] = dataclasses.field(
        default_factory=lambda: functools.cache(measure_seconds)
    )

    def stages(self, count: int) -> _Stages:
        if count not in self._stages_by_count:
            cut = cut_model(self.model, self.config.cut, count, seconds=self._seconds)  # as for training
            operations = [count_operations(cut, stage, self.rows) for stage in cut.stages]
            plans = tuple(self._stage(cut, index, total) for index, (total, _) in enumerate(operations))
            self._stages_by_count[count] = _Stages(cut, plans, any(has_loops for _, has_loops in operations))
        return self._stages_by_count[count]

    def plan(self, schedule: Schedule) -> SchedulePlan:
        stages = self.stages(schedule.stages)
        forward = [float(plan.operations) for plan in stages.plans]
        backward = [2 * operations for operations in forward]
        if self.config.measure_stages:
            forward = [plan.forward_seconds or 0.0 for plan in stages.plans]
            backward = [plan.backward_seconds or 0.0 for plan in stages.plans]
        idle, makespan = idle_and_makespan(schedule, forward, backward)
        activations = schedule.live_activations([plan.bytes["activations"] for plan in stages.plans])
        state = [self._state_bytes(stages.cut, schedule.stages_of(process)) for process in range(schedule.processes)]
        delays = schedule.delays or (0,) * schedule.processes
        versions = [delay * plan.bytes["gradients"] for plan, delay in zip(stages.plans, delays, strict=False)]
        sizes = zip(state, versions, activations, strict=True)
        return SchedulePlan(
            schedule.name,
            idle,
            tuple(int(count) for count in schedule.live_activations()),
            tuple(variables + old_weights + int(kept) for variables, old_weights, kept in sizes),
            tuple(versions),
            sent_bytes_per_step(schedule, stages.plans, stages.cut),
            makespan if self.config.measure_stages else None,
        )

    def _stage(self, cut: Cut, index: int, operations: int) -> StagePlan:
        stage = cut.stages[index]
        calls, trainable = cut.call_names(stage), stage.variables.trainable
        received_bytes = sum(crossing.bytes for crossing in stage.received)
        seconds = measure_stage(cut, stage, self.rows) if self.config.measure_stages else (None, None)
        compression = METHODS[self.config.activation_compression]()
        return StagePlan(
            first_layer=calls[0],
            last_layer=calls[-1],
            parameters=sum(variable.shape.num_elements() for variable in trainable),
            bytes={
                "variables": sum(map(self.device_bytes, stage.variables.all)),
                "gradients": sum(map(self.device_bytes, trainable)),
                "optimizer_state": sum(map(self._slot_bytes, trainable)),
                "activations": self.rows * (cut.activation_bytes(stage) + received_bytes),
            },
            reduced_bytes=sum(map(keras_internals.bytes_of, trainable)),
            operations=operations,
            sent=tuple(
                SentTensor(
                    tensor.name,
                    tuple(crossing.spec.shape),
                    crossing.spec.dtype.name,
                    message_bytes(crossing.spec, compression, ReplicaContextCollectives.dtypes),
                    crossing.has_gradient,
                )
                for tensor, crossing in zip(stage.sent, crossing_specs(stage.sent, self.rows), strict=True)
            ),
            forward_seconds=seconds[0],
            backward_seconds=seconds[1],
        )

    def optimizer_parts(self, schedule: Schedule) -> tuple[tuple[int, ...], ...]:
        """Returns the bytes of the optimizer state by process and replica; see `PipelinePlan`."""
        cut = self.stages(schedule.stages).cut
        return tuple(
            tuple(self._parts(self._variables(cut, schedule.stages_of(process))))
            for process in range(schedule.processes)
        )

    def _state_bytes(self, cut: Cut, stage_indices: Sequence[int]) -> int:
        """Returns the bytes of variables, gradients and optimizer state of a process; shared variables count once."""
        variables = self._variables(cut, stage_indices)
        sizes = [self.device_bytes(variable) * (2 if variable.trainable else 1) for variable in variables]
        return sum(sizes) + max(self._parts(variables))

    def _variables(self, cut: Cut, stage_indices: Sequence[int]) -> list[keras.Variable]:
        variable_ids = {id(variable) for index in stage_indices for variable in cut.stages[index].variables.all}
        return [variable for variable in self.model.graph.model.variables if id(variable) in variable_ids]

    def _parts(self, variables: Sequence[keras.Variable]) -> list[int]:
        trainable = [variable for variable in variables if variable.trainable]
        return sizes_of_parts(
            [self.device_bytes(variable) for variable in trainable], [*map(self._slot_bytes, trainable)], self.shards
        )

    def _slot_bytes(self, variable: keras.Variable) -> int:
        return self.slots.get(id(variable), 0) * self.device_bytes(variable)


def sent_bytes_per_step(schedule: Schedule, stages: Sequence[StagePlan], cut: Cut) -> tuple[int, ...]:
    """Returns, for each process, the bytes of its messages in a step; see `SchedulePlan`."""
    sent_bytes = [0] * schedule.processes
    for index, stage in enumerate(stages[:-1]):
        process, next_process = schedule.process_of(index), schedule.process_of(index + 1)
        if process != next_process:
            sent_bytes[process] += schedule.micro_batches * stage.sent_bytes
            sent_bytes[next_process] += schedule.micro_batches * sum(
                tensor.bytes for tensor in stage.sent if tensor.has_gradient
            )
    for variable, stage_indices in cut.shared:
        first, *other_processes = schedule.processes_of(stage_indices)
        for other_process in other_processes:  # sends its gradient to the first process, and receives the sum
            sent_bytes[first] += keras_internals.bytes_of(variable)
            sent_bytes[other_process] += keras_internals.bytes_of(variable)
    return tuple(sent_bytes)
