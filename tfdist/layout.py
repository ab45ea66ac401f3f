"""Print the memory per device and the communication of a step on a mesh, of a pipeline, of replicas or of parameter servers."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfdist.cli import command, layout_reports
from tfdist.cli.output import TEXT, Output
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.fields import AUTO
from tfdist.config.layout_config import LayoutConfig
from tfdist.config.layouts import parse_layout, parse_shard, replication_reason, rules_text
from tfdist.errors import byte_size
from tfdist.reporting.plain_reporter import text_table

if TYPE_CHECKING:
    from tfdist.planning.layout_plan import Plan, VariablePlan


def main(config: LayoutConfig, output: Output = TEXT) -> int:
    """Prints the plan; returns the exit code."""
    if config.has_stages:
        report = layout_reports.pipeline_report
    elif config.has_servers:
        report = layout_reports.server_report
    else:
        report = layout_reports.replica_report if config.has_replicas else _mesh_report
    lines, result = report(config)
    for line in (*lines, *result.get("notes", ())):
        output.line(line)
    output.result(result)
    return 0


def _mesh_report(config: LayoutConfig) -> layout_reports.Report:
    load_tensorflow()  # imported late, after parsing flags
    from tfdist.config.mesh import mesh_of
    from tfdist.data import check_batch_size
    from tfdist.planning import layout_plan

    abstract_model = layout_plan.planned_model(config)
    mesh = mesh_of(config.mesh_shape, 0 if config.mesh_shape else config.devices)
    rules = parse_layout("" if config.layout == AUTO else config.layout, mesh)
    check_batch_size(config.batch_size, mesh.axes[rules["batch"]], config.accumulate_steps, equal=True)
    micro_batch_size = config.batch_size // config.accumulate_steps
    shard = parse_shard(config.shard, config.shard_axis or rules["batch"], config.shard_min_elements, mesh)
    lines = []
    if config.layout == AUTO:
        memory = config.memory_gb * 2**30
        plan = layout_plan.cheapest_layout(abstract_model, mesh, rules, shard, micro_batch_size, memory)
        lines = [f"--layout={rules_text(plan.rules)}"]
    else:
        plan = abstract_model.plan(mesh, rules, shard, micro_batch_size)
    return [*lines, *_lines(plan, config.accumulate_steps)], {
        "mesh": dict(plan.mesh.axes),
        "layout": dict(plan.rules),
        "shard": shard.stage,
        "shard_axis": shard.axis,
        "device_bytes": _device_bytes(plan.totals()),
        "variables": [_variable_to_json(variable, plan) for variable in plan.variables],
        "micro_steps_per_step": config.accumulate_steps,
        "collectives": layout_reports.collectives_to_json(plan),
        "warnings": plan.warnings,
        "notes": list(_notes(plan, layout_plan.uncounted_rules(plan.rules), config)),
    }


def _lines(plan: "Plan", micro_steps: int) -> Iterator[str]:
    header = ("variable", "dims", "shape", "computed", "stored", "optimizer", "on a device")
    rows = [
        (
            *layout_reports.described_dims(v),
            str(v.placement.computation),
            str(v.placement.storage),
            str(v.placement.slots) if v.slots else "-",
            byte_size(v.bytes_per_device(plan.mesh)["parameters"]),
        )
        for v in plan.variables
    ]
    yield f"Mesh {plan.mesh}; rules {'; '.join(f'{dim}:{axis}' for dim, axis in plan.rules.items())}"
    yield from text_table([header, *rows])
    variables_by_reason: dict[str, list[VariablePlan]] = {}
    for v in plan.variables:
        if v.is_replicated(plan.mesh):
            reason = replication_reason(v.shape, v.trainable, v.slots, plan.mesh, plan.shard)
            variables_by_reason.setdefault(reason, []).append(v)
    for reason, variables in variables_by_reason.items():
        yield layout_reports.replicated_line(variables, f", {reason}")
    yield ""
    totals = {kind.replace("_", " "): byte_size(size) for kind, size in _device_bytes(plan.totals()).items()}
    yield "On each device: " + ", ".join(f"{kind} {size}" for kind, size in totals.items())
    for warning in plan.warnings:
        yield f"Warning: {warning}"
    if plan.traffic:
        period = f"each of the {micro_steps} micro-steps of a step" if micro_steps > 1 else "a step"
        yield f"Collectives of {period}, with the size of the tensor on each device:"
        purposes = {"updated variables": "updated variables, once per step"} if micro_steps > 1 else {}
        traffic_rows = [
            (purposes.get(traffic.purpose, traffic.purpose), traffic.kind, traffic.axis, byte_size(traffic.bytes))
            for traffic in plan.traffic
        ]
        yield from text_table([("purpose", "operation", "axis", "size"), *traffic_rows])


def _notes(plan: "Plan", uncounted_rules: list[str], config: LayoutConfig) -> Iterator[str]:
    from tfdist.layers.recompute import NONE

    yield from layout_reports.layer_notes(plan, "communication and memory")
    if uncounted_rules:
        yield f"Not counted: communication caused by {'; '.join(uncounted_rules)}."
    if config.recompute != NONE:
        yield "Not counted: communication that --recompute repeats."
    yield from layout_reports.precision_notes(config, "send")


def _variable_to_json(variable: "VariablePlan", plan: "Plan") -> dict[str, Any]:
    return layout_reports.variable_to_json(variable) | {
        "dims": list(variable.dims),
        "computed": str(variable.placement.computation),
        "stored": str(variable.placement.storage),
        "optimizer": str(variable.placement.slots) if variable.slots else None,
        "replicated": variable.is_replicated(plan.mesh),
        "device_bytes": _device_bytes(variable.bytes_per_device(plan.mesh)),
    }


def _device_bytes(sizes: dict[str, int]) -> dict[str, int]:
    return {kind.replace("slots", "optimizer_state"): size for kind, size in sizes.items()}


_EXAMPLES = (
    "tfdist layout --model=transformer --dataset=text --mesh_shape='data:2;model:4' --layout='heads:model;ffn:model'",
    "tfdist layout --model=transformer --dataset=text --mesh_shape=stage:2 --micro_batches=8 --measure_stages",
)

if __name__ == "__main__":
    sys.exit(command.run("layout", LayoutConfig, main, about=__doc__, has_json=True, examples=_EXAMPLES))
