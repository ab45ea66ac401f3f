"""Print the memory per device and the communication of a step on a mesh, of a pipeline, of replicas or of parameter servers."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.cli import command, layout_reports
from tfdist.cli.output import TEXT, Output
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.fields import AUTO
from tfdist.config.layout_config import LayoutConfig
from tfdist.config.layouts import Shard, parse_layout, parse_shard, replication_reason, rules_text, unused_rule_warnings
from tfdist.errors import byte_size
from tfdist.reporting.plain_reporter import text_table

if TYPE_CHECKING:
    from tfdist.planning.layout_plan import Plan, VariablePlan

_MAX_PATHS = 3  # paths per group of variables


def main(config: LayoutConfig, output: Output = TEXT) -> int:
    """Prints the plan; returns the exit code."""
    if config.has_stages:
        return layout_reports.print_pipeline_layout(config, output)
    if config.has_servers:
        return layout_reports.print_server_layout(config, output)
    if config.has_replicas:
        return layout_reports.print_replica_layout(config, output)
    load_tensorflow()  # imported late, after parsing flags
    from tfdist.config.mesh import mesh_of
    from tfdist.data import check_batch_size
    from tfdist.planning import layout_plan
    from tfdist.planning.layout_plan import planned_model

    abstract_model = planned_model(config)
    mesh = mesh_of(config.mesh_shape, 0 if config.mesh_shape else config.devices)
    rules = parse_layout("" if config.layout == AUTO else config.layout, mesh)
    check_batch_size(config.batch_size, mesh.axes[rules["batch"]], config.accumulate_steps, equal=True)
    rows = config.batch_size // config.accumulate_steps
    shard = parse_shard(config.shard, config.shard_axis or rules["batch"], config.shard_min_elements, mesh)
    if config.layout == AUTO:
        rules, plan = layout_plan.cheapest_layout(abstract_model, mesh, rules, shard, rows, config.memory_gb * 2**30)
        output.line(f"--layout={rules_text(rules)}")
    else:
        plan = abstract_model.plan(mesh, rules, shard, rows)
    notes = list(_notes(plan, layout_plan.uncounted_rules(rules), config))
    for line in (*_lines(plan, rules, shard, config.accumulate_steps), *notes):
        output.line(line)
    output.result(_facts(plan, rules, shard, config.accumulate_steps) | {"notes": notes})
    return 0


def _lines(plan: "Plan", rules: Mapping[str, str], shard: Shard, micro_steps: int) -> Iterator[str]:
    header = ("variable", "dims", "shape", "computed", "stored", "optimizer", "on a device")
    rows = [
        (
            v.path,
            " ".join(v.dims),
            "x".join(map(str, v.shape)),
            str(v.placement.computation),
            str(v.placement.storage),
            str(v.placement.slots) if v.slots else "-",
            byte_size(v.bytes_per_device(plan.mesh)["parameters"]),
        )
        for v in plan.variables
    ]
    yield f"Mesh {plan.mesh}; rules {'; '.join(f'{dim}:{axis}' for dim, axis in rules.items())}"
    yield from text_table([header, *rows])
    yield from _replicated_lines(plan, shard)
    yield ""
    totals = {kind.replace("_", " "): size for kind, size in _rename_kinds(plan.totals()).items()}
    yield "On each device: " + ", ".join(f"{kind} {byte_size(size)}" for kind, size in totals.items())
    for line in unused_rule_warnings(rules, plan.dims, shard, plan.mesh):
        yield f"Warning: {line}"
    if plan.traffic:
        period = f"each of the {micro_steps} micro-steps of a step" if micro_steps > 1 else "a step"
        yield f"Collectives of {period}, with the size of the tensor on each device:"
        purposes = {"updated variables": "updated variables, once per step"} if micro_steps > 1 else {}
        traffic_rows = [
            (purposes.get(traffic.purpose, traffic.purpose), traffic.kind, traffic.axis, byte_size(traffic.bytes))
            for traffic in plan.traffic
        ]
        yield from text_table([("what", "operation", "axis", "size"), *traffic_rows])


def _notes(plan: "Plan", missing: Sequence[str], config: LayoutConfig) -> Iterator[str]:
    from tfdist.layers.recompute import NONE

    if plan.unknown_layers:
        yield f"Not counted: communication and memory of these nested layers: {', '.join(plan.unknown_layers)}."
    if plan.unclear_layers:
        yield f"Not fully counted: communication of layers that the engine lays out: {', '.join(plan.unclear_layers)}."
    if missing:
        yield f"Not counted: communication caused by {'; '.join(missing)}."
    if config.recompute != NONE:
        yield "Not counted: communication that --recompute repeats."
    if "16" in config.precision:
        yield (
            "Gradients and activations are counted in 32 bits, although layers that compute in 16 bits send theirs in 16."
        )


def _facts(plan: "Plan", rules: Mapping[str, str], shard: Shard, micro_steps: int) -> dict[str, Any]:
    return {
        "mesh": dict(plan.mesh.axes),
        "layout": dict(rules),
        "shard": shard.stage,
        "shard_axis": shard.axis,
        "device_bytes": _rename_kinds(plan.totals()),
        "variables": [_variable(variable, plan) for variable in plan.variables],
        "micro_steps_per_step": micro_steps,
        "collectives": layout_reports.collective_facts(plan),
        "warnings": unused_rule_warnings(rules, plan.dims, shard, plan.mesh),
    }


def _variable(variable: "VariablePlan", plan: "Plan") -> dict[str, Any]:
    return {
        "path": variable.path,
        "dims": list(variable.dims),
        "shape": list(variable.shape),
        "bytes": variable.bytes,
        "computed": str(variable.placement.computation),
        "stored": str(variable.placement.storage),
        "optimizer": str(variable.placement.slots) if variable.slots else None,
        "replicated": variable.is_replicated(plan.mesh),
        "device_bytes": _rename_kinds(variable.bytes_per_device(plan.mesh)),
    }


def _rename_kinds(sizes: Mapping[str, int]) -> dict[str, int]:
    return {kind.replace("slots", "optimizer_state"): size for kind, size in sizes.items()}


def _replicated_lines(plan: "Plan", shard: Shard) -> Iterator[str]:
    """Yields lines about variables that are not sharded, by reason."""
    reasons: dict[str, list[VariablePlan]] = {}
    for v in plan.variables:
        if v.is_replicated(plan.mesh):
            reasons.setdefault(replication_reason(v.shape, v.trainable, v.slots, plan.mesh, shard), []).append(v)
    for reason, variables in reasons.items():
        paths = ", ".join(v.path for v in variables[:_MAX_PATHS]) + (", ..." if len(variables) > _MAX_PATHS else "")
        count = f"{len(variables)} variable{'s' if len(variables) > 1 else ''}"
        yield f"Replicated on each device: {count}, {byte_size(sum(v.bytes for v in variables))}, {reason} ({paths})"


_EXAMPLES = (
    "tfdist layout --model=transformer --dataset=text --mesh_shape='data:2;model:4' --layout='heads:model;ffn:model'",
    "tfdist layout --model=transformer --dataset=text --mesh_shape=stage:2 --micro_batches=8 --measure_stages",
)

if __name__ == "__main__":
    sys.exit(command.run("layout", LayoutConfig, main, about=__doc__, has_json=True, examples=_EXAMPLES))
