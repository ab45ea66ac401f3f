"""Reports of `tfdist layout` about replicas, pipelines and parameter servers: memory per device and communication of a step."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.layout_config import LayoutConfig
from tfdist.config.layouts import ProcessGrid, Shard, parse_grid, parse_layout
from tfdist.config.mesh import Mesh, parse_mesh
from tfdist.config.pipeline import parse_cut
from tfdist.config.staleness import parse_staleness
from tfdist.distribution.balanced_parts import describe_parts, sizes_of_parts
from tfdist.errors import InputError, byte_size, count_of
from tfdist.pipelining.schedule_catalog import make_schedule
from tfdist.reporting.plain_reporter import text_table

if TYPE_CHECKING:
    from tfdist.planning.layout_plan import AbstractModel, Plan, VariablePlan
    from tfdist.planning.pipeline_plan import PipelinePlan, SchedulePlan, StagePlan

Report = tuple[list[str], dict[str, Any]]  # lines, and the JSON values, whose "notes" are further lines
_AXIS = "data"
_MAX_LISTED = 3  # paths of replicated variables, and tensors between stages


def replica_report(config: LayoutConfig) -> Report:
    """Returns the plan of replicas."""
    load_tensorflow()
    _, plan, micro_step_size = _replicated_plan(config, config.processes)
    trainable = [variable for variable in plan.variables if variable.trainable]
    parts = sizes_of_parts(
        [variable.bytes for variable in trainable],
        [variable.optimizer_bytes for variable in trainable],
        config.processes if config.shard == "optimizer" else 1,
    )
    totals = plan.totals()
    return list(_replica_lines(plan, parts, micro_step_size, config)), {
        "strategy": config.strategy,
        "processes": config.processes,
        "shard": config.shard,
        "process_bytes": {kind: totals[kind] for kind in ("parameters", "gradients", "activations")},
        "optimizer_state_bytes": [parts[rank % len(parts)] for rank in range(config.processes)],
        "variables": [variable_to_json(v) | {"optimizer_state_bytes": v.optimizer_bytes} for v in plan.variables],
        "micro_steps_per_step": config.accumulate_steps,
        "micro_step_examples": micro_step_size,
        "notes": list(precision_notes(config, "have")),
    }


def _replicated_plan(config: LayoutConfig, replicas: int) -> "tuple[AbstractModel, Plan, int]":
    """Returns the model, its plan on replicas, and the largest number of examples of a micro-step on a replica."""
    from tfdist.planning.layout_plan import planned_model

    model, micro_step_size = planned_model(config), -(-config.batch_size // (replicas * config.accumulate_steps))
    plan = model.plan(Mesh({_AXIS: replicas}), {"batch": _AXIS}, Shard(axis=_AXIS), micro_step_size * replicas)
    return model, plan, micro_step_size


def precision_notes(config: LayoutConfig, verb: str) -> Iterator[str]:
    """Yields a note about layers that compute in 16 bits; they `have` or `send` gradients and activations."""
    if "16" in config.precision:
        yield (
            "Gradients and activations are counted as 32-bit, although layers that compute in 16 bits "
            f"{verb} 16-bit ones."
        )


def layer_notes(plan: "Plan", uncounted: str) -> Iterator[str]:
    """Yields notes about layers that are not fully counted; `uncounted` is what is not counted of nested layers."""
    if plan.unknown_layers:
        yield f"Not counted: {uncounted} of these nested layers: {', '.join(plan.unknown_layers)}."
    if plan.unclear_layers:
        yield f"Not fully counted: communication of layers whose layout the engine chooses: {', '.join(plan.unclear_layers)}."


def variable_to_json(variable: "VariablePlan") -> dict[str, Any]:
    """Returns path, shape and bytes of a variable as JSON values."""
    return {"path": variable.path, "shape": list(variable.shape), "bytes": variable.bytes}


def described_dims(variable: "VariablePlan") -> tuple[str, str, str]:
    """Returns the path, dims and shape of a variable as cells of a table."""
    return variable.path, " ".join(variable.dims), "x".join(map(str, variable.shape))


def replicated_line(variables: "Sequence[VariablePlan]", reason: str = "") -> str:
    """Returns a line about variables that are replicated, for a reason."""
    paths = ", ".join(v.path for v in variables[:_MAX_LISTED]) + (", ..." if len(variables) > _MAX_LISTED else "")
    size = byte_size(sum(v.bytes for v in variables))
    return f"Replicated on each device: {count_of(len(variables), 'variable')}, {size}{reason} ({paths})"


def _variable_row(variable: "VariablePlan", *cells: str) -> tuple[str, ...]:
    path, _, shape = described_dims(variable)
    return (path, shape, byte_size(variable.bytes), *cells)


def _replica_lines(plan: "Plan", parts: Sequence[int], micro_step_size: int, config: LayoutConfig) -> Iterator[str]:
    steps = f" in each of {config.accumulate_steps} micro-steps" if config.accumulate_steps > 1 else ""
    yield f"{config.strategy} in {count_of(config.processes, 'process')}, at most {micro_step_size} examples on each{steps}"
    table = [_variable_row(v, byte_size(v.optimizer_bytes) if v.slots else "-") for v in plan.variables]
    yield from text_table([("variable", "shape", "bytes", "optimizer"), *table])
    totals = {kind: byte_size(size) for kind, size in plan.totals().items()}
    state = byte_size(max(parts)) if len(parts) == 1 else f"at most {byte_size(max(parts))}"
    yield (
        f"On each process: parameters {totals['parameters']}, gradients {totals['gradients']}, "
        f"optimizer state {state}, activations {totals['activations']}"
    )
    if len(parts) > 1:
        yield f"Optimizer state, sharded over {len(parts)} replicas: {describe_parts(parts)}"
    yield f"Gradients of {totals['gradients']} are summed over the replicas once per step."
    if len(parts) > 1:
        yield f"Updated weights of {totals['gradients']} are gathered from the replicas once per step."


def _trainable_variables(plan: "Plan", is_replicated: bool) -> "list[VariablePlan]":
    """Returns the trainable variables that are replicated on the devices of a process, or else those that are sharded."""
    return [v for v in plan.variables if v.trainable and v.is_replicated(plan.mesh) == is_replicated]


def _device_lines(plan: "Plan") -> Iterator[str]:
    rows = [
        (*described_dims(v), str(v.placement.computation), byte_size(v.bytes_per_device(plan.mesh)["parameters"]))
        for v in _trainable_variables(plan, is_replicated=False)
    ]
    if rows:
        yield f"Sharded over the {plan.mesh.size} devices of a process:"
        yield from text_table([("variable", "dims", "shape", "layout", "on a device"), *rows])
    if variables := _trainable_variables(plan, is_replicated=True):
        yield replicated_line(variables)
    for warning in plan.warnings:
        yield f"Warning: {warning}"
    if plan.traffic:
        yield "Collectives of the devices for each micro-batch, with the size of the tensor on each device:"
        collective_rows = [(traffic.purpose, traffic.kind, byte_size(traffic.bytes)) for traffic in plan.traffic]
        yield from text_table([("purpose", "operation", "size"), *collective_rows])


def _sharding_to_json(plan: "Plan | None") -> dict[str, Any]:
    if plan is None:
        return {"layout": {}, "sharded_variables": [], "collectives": [], "warnings": []}
    return {
        "layout": {dim: axis for dim, axis in plan.rules.items() if dim != "batch"},
        "sharded_variables": [
            variable_to_json(v)
            | {
                "dims": list(v.dims),
                "layout": str(v.placement.computation),
                "device_bytes": v.bytes_per_device(plan.mesh)["parameters"],
            }
            for v in _trainable_variables(plan, is_replicated=False)
        ],
        "collectives": collectives_to_json(plan),
        "warnings": plan.warnings,
    }


def collectives_to_json(plan: "Plan") -> list[dict[str, Any]]:
    """Returns the collectives of a plan as JSON values."""
    return [
        {"what": traffic.purpose, "operation": traffic.kind, "axis": traffic.axis, "device_bytes": traffic.bytes}
        for traffic in plan.traffic
    ]


def pipeline_report(config: LayoutConfig) -> Report:
    """Returns the plan of a pipeline."""
    mesh = parse_mesh(config.mesh_shape)  # which need not exist on this machine
    grid = parse_grid(config.mesh_shape, mesh.size // mesh.axes.get("model", 1), config.layout)
    micro_batch_size = _micro_batch_size(config, grid)
    parse_cut(config.cut)
    make_schedule(config.pipeline_schedule, grid.stages, config.micro_batches)  # before TensorFlow is loaded
    load_tensorflow()
    import keras

    from tfdist.cluster.devices import limit_threads
    from tfdist.planning.layout_plan import planned_model
    from tfdist.planning.pipeline_plan import plan_pipeline

    limit_threads(config.intra_op_threads)
    keras.utils.clear_session(free_memory=False)  # names of layers as in training
    abstract_model = planned_model(config)
    device_plan = None
    if grid.devices > 1:
        devices = Mesh({"data": 1, "model": grid.devices})
        device_plan = abstract_model.plan(devices, parse_layout(config.layout, devices), Shard(), micro_batch_size)
    more_options = {"device_bytes": abstract_model.device_bytes(device_plan)} if device_plan else {}
    plan = plan_pipeline(abstract_model, config, grid, micro_batch_size, **more_options)
    return list(_pipeline_lines(plan, grid, micro_batch_size, config, device_plan)), {
        "mesh": {"stage": grid.stages, "data": grid.replicas, "model": grid.devices},
        "micro_batches": config.micro_batches,
        "micro_batch_examples": micro_batch_size,
        "pipeline_schedule": config.pipeline_schedule,
        "cut": config.cut,
        "activation_compression": config.activation_compression,
        "shard": config.shard,
        "stages": [_stage_to_json(stage) for stage in plan.stages],
        "shared_variables": plan.shared,
        "optimizer_state_bytes": plan.optimizer_parts,
        "schedules": [dataclasses.asdict(schedule_plan) for schedule_plan in plan.schedules],
        "impossible_schedules": dict(plan.impossible_schedules),
        **_sharding_to_json(device_plan),
        "notes": list(_pipeline_notes(plan, grid, config, device_plan)),
    }


def _micro_batch_size(config: LayoutConfig, grid: ProcessGrid) -> int:
    parts = grid.replicas * config.micro_batches
    if config.batch_size % parts:
        raise InputError(
            "A batch must divide into micro-batches of equal size. Received: "
            f"--batch_size={config.batch_size}, {count_of(grid.replicas, 'replica')} and --micro_batches="
            f"{config.micro_batches}. Choose a --batch_size that is divisible by {parts}."
        )
    return config.batch_size // parts


def _pipeline_lines(
    plan: "PipelinePlan", grid: ProcessGrid, micro_batch_size: int, config: LayoutConfig, device_plan: "Plan | None"
) -> Iterator[str]:
    devices = f" with {grid.devices} devices each" if grid.devices > 1 else ""
    yield (
        f"{len(plan.stages)} stages in {grid.stages} processes{devices}, {count_of(grid.replicas, 'replica')}, each step "
        f"{count_of(config.micro_batches, 'micro-batch')} of {count_of(micro_batch_size, 'example')}"
        + (" per replica" if grid.replicas > 1 else "")
    )
    yield from text_table([_stage_header(plan), *(_stage_row(index, stage) for index, stage in enumerate(plan.stages))])
    for index, stage in enumerate(plan.stages[:-1]):
        tensors = [
            f"{t.name} ({'x'.join(map(str, t.shape))} {t.dtype}{'' if t.has_gradient else ', without gradient'})"
            for t in stage.sent[:_MAX_LISTED]
        ]
        tensors += ["..."] * (len(stage.sent) > _MAX_LISTED)
        yield f"To stage {index + 1}: {', '.join(tensors)}"
    for shared in plan.shared:
        stages, size = " and ".join(map(str, shared["stages"])), byte_size(shared["bytes"])
        yield f"In stages {stages}: {shared['path']}, {size}, whose gradients are summed over these stages"
    for index, parts in enumerate(plan.optimizer_parts):
        if len(parts) > 1:
            name = "stage" if len(plan.stages) == grid.stages else "process"
            yield f"Optimizer state of {name} {index}, sharded over {len(parts)} replicas: {describe_parts(parts)}"
    if device_plan is not None:
        yield ""
        yield from _device_lines(device_plan)
    yield ""
    micro_batches = count_of(config.micro_batches, "micro-batch")
    yield f"Schedules with {micro_batches}; live micro-batches, memory and messages of each process:"
    time_columns = ["step"] if config.measure_stages else []
    schedule_rows = [_schedule_row(schedule_plan, config.measure_stages) for schedule_plan in plan.schedules]
    yield from text_table([("schedule", "idle", *time_columns, "live", "memory", "sent in a step"), *schedule_rows])


def _stage_header(plan: "PipelinePlan") -> tuple[str, ...]:
    time_columns = ("forward", "backward") if plan.stages[0].forward_seconds is not None else ("FLOPs",)
    return ("stage", "from", "to", "parameters", "variables", "optimizer", "activations", "sent", *time_columns)


def _stage_row(index: int, stage: "StagePlan") -> tuple[str, ...]:
    seconds = [time for time in (stage.forward_seconds, stage.backward_seconds) if time is not None]
    return (
        str(index),
        stage.first_layer,
        stage.last_layer,
        f"{stage.parameters:,}",
        *(byte_size(stage.bytes[kind]) for kind in ("variables", "optimizer_state", "activations")),
        byte_size(stage.sent_bytes) if stage.sent else "-",
        *([_milliseconds(time) for time in seconds] or [f"{stage.operations:.3g}"]),
    )


def _schedule_row(plan: "SchedulePlan", is_timed: bool) -> tuple[str, ...]:
    return (
        plan.schedule,
        f"{plan.idle:.1%}",
        *([_milliseconds(plan.step_seconds or 0.0)] if is_timed else []),
        " ".join(map(str, plan.live_micro_batches)),
        ", ".join(map(byte_size, plan.process_bytes)),
        ", ".join(map(byte_size, plan.message_bytes)),
    )


def _pipeline_notes(
    plan: "PipelinePlan", grid: ProcessGrid, config: LayoutConfig, devices: "Plan | None"
) -> Iterator[str]:
    for name, reason in plan.impossible_schedules.items():
        yield f"Not possible: {name}. {reason}"
    if config.measure_stages:
        yield "Step times exclude messages between stages, gradient reduction over replicas, and the optimizer update."
    else:
        yield (
            "Idle time is estimated from FLOPs, a backward pass counting as two forward passes. --measure_stages measures it."
        )
    for schedule in plan.schedules:
        if any(schedule.older_weights_bytes):
            sizes = ", ".join(map(byte_size, schedule.older_weights_bytes))
            yield f"The memory of {schedule.schedule} includes {sizes} for older versions of the weights."
    if plan.has_loops:
        yield "Not counted: FLOPs and activations in loops, such as the steps of a recurrent layer."
    if grid.replicas > 1:
        size = max(stage.reduced_bytes for stage in plan.stages)
        yield f"Gradients of each stage, at most {byte_size(size)}, are summed over the {grid.replicas} replicas once per step."
        if config.shard == "optimizer":
            yield f"Updated weights of each stage, at most {byte_size(size)}, are gathered from the replicas once per step."
    if devices is not None:
        yield (
            "Variables, gradients and optimizer state are counted per device, activations as on one device without --layout. "
            "In addition, the unsharded gradients are in host memory while they are reduced."
        )
        yield from layer_notes(devices, "communication")


def _stage_to_json(stage: "StagePlan") -> dict[str, Any]:
    result = dataclasses.asdict(stage) | {"sent_bytes": stage.sent_bytes}
    del result["reduced_bytes"]
    return result


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def server_report(config: LayoutConfig) -> Report:
    """Returns the plan of parameter servers."""
    load_tensorflow()
    from tfdist import keras_internals
    from tfdist.parameter_server.embedding_tables import is_table
    from tfdist.parameter_server.servers import bytes_by_server, placement_of

    staleness, servers = parse_staleness(config.staleness), max(config.servers, 1)
    abstract_model, plan, examples = _replicated_plan(config, 1 if staleness.whole_batches else config.processes)
    model = abstract_model.model
    plans = {id(variable): planned for variable, planned in zip(abstract_model.variables, plan.variables, strict=True)}
    states = keras_internals.moving_statistics(model) if staleness.has_server_states else []
    server_variables = [*model.trainable_variables, *states]
    tables = {
        id(keras_internals.kernel_of(layer))
        for layer in keras_internals.layers_of(model)
        if is_table(layer, config.min_table_bytes, servers)
    }
    row_counts = {n: variable.shape[0] for n, variable in enumerate(server_variables) if id(variable) in tables}
    server_plans = [plans[id(variable)] for variable in server_variables]
    placement = placement_of([(v.path, v.bytes) for v in server_plans], row_counts, servers, config.shard_variables)
    placements = list(zip(server_plans, placement, strict=True))
    variable_loads = bytes_by_server([v.bytes for v in server_plans], placement, row_counts, servers)
    state_loads = bytes_by_server([v.optimizer_bytes for v in server_plans], placement, row_counts, servers)
    table_bytes = sum(variable.bytes for variable, server in placements if server < 0)
    totals = plan.totals()
    result = {
        "strategy": config.strategy,
        "workers": config.processes,
        "servers": [
            {"variable_bytes": variables, "optimizer_state_bytes": state}
            for variables, state in zip(variable_loads, state_loads, strict=True)
        ],
        "worker_bytes": {
            "parameters": totals["parameters"] - table_bytes,
            "gradients": totals["gradients"] - table_bytes,
            "activations": totals["activations"],
        },
        "variables": [variable_to_json(v) | {"server": None if server < 0 else server} for v, server in placements],
        "step_examples": examples,
    }
    return list(_server_lines(placements, result)), result


def _server_lines(placements: "list[tuple[VariablePlan, int]]", result: Mapping[str, Any]) -> Iterator[str]:
    workers, servers = count_of(result["workers"], "worker"), count_of(len(result["servers"]), "server")
    yield f"{result['strategy']} with {workers} and {servers}, at most {result['step_examples']} examples of a step per worker"
    rows = [
        _variable_row(v, byte_size(v.optimizer_bytes), "by rows" if server < 0 else str(server))
        for v, server in placements
    ]
    yield from text_table([("variable", "shape", "bytes", "optimizer", "server"), *rows])
    for index, server in enumerate(result["servers"]):
        variables, state = map(byte_size, server.values())
        yield f"On server {index}: variables {variables}, optimizer state {state}"
    sizes = {kind: byte_size(size) for kind, size in result["worker_bytes"].items()}
    table_suffix = ", and the rows of tables that a step uses" if any(server < 0 for _, server in placements) else ""
    yield f"On each worker: {', '.join(f'{kind} {size}' for kind, size in sizes.items())}, no optimizer state{table_suffix}"
    pulled_size = byte_size(sum(variable.bytes for variable, server in placements if server >= 0))
    yield f"For a step, a worker pulls {pulled_size} and pushes gradients of {sizes['gradients']}{table_suffix}."
