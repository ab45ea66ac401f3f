"""Prints the plan of replicas in processes of their own, for `tfdist layout`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.cli import tensorflow_import
from tfdist.cli.output import Output, text_table
from tfdist.config.layout_config import LayoutConfig
from tfdist.config.layouts import Shard
from tfdist.config.mesh import Mesh
from tfdist.distribution.balanced_parts import describe_parts, sizes_of_parts
from tfdist.errors.formatting import byte_size, count_of

if TYPE_CHECKING:
    from tfdist.planning.layout_plan import Plan, VariablePlan

_AXIS = "data"


def main(config: LayoutConfig, output: Output) -> int:
    """Prints the plan."""
    tensorflow_import.load_tensorflow()
    from tfdist.cli.planned_model import planned_model

    rows = -(-config.batch_size // (config.processes * config.accumulate_steps))
    mesh = Mesh({_AXIS: config.processes})
    plan = planned_model(config).plan(mesh, {"batch": _AXIS}, Shard(axis=_AXIS), rows * config.processes)
    trained = [variable for variable in plan.variables if variable.trainable]
    parts = sizes_of_parts(
        [variable.bytes for variable in trained],
        [_state_bytes(variable) for variable in trained],
        config.processes if config.shard == "optimizer" else 1,
    )
    notes = list(_notes(config))
    for line in (*_lines(plan, parts, rows, config), *notes):
        output.line(line)
    output.result(_facts(plan, parts, rows, config) | {"notes": notes})
    return 0


def _state_bytes(variable: "VariablePlan") -> int:
    return variable.slots * variable.bytes


def _lines(plan: "Plan", parts: Sequence[int], rows: int, config: LayoutConfig) -> Iterator[str]:
    steps = f" in each of {config.accumulate_steps} micro-steps" if config.accumulate_steps > 1 else ""
    yield f"{config.strategy} in {count_of(config.processes, 'process')}, at most {rows} examples on each{steps}"
    header = ("variable", "shape", "bytes", "optimizer")
    table = [
        (v.path, "x".join(map(str, v.shape)), byte_size(v.bytes), byte_size(_state_bytes(v)) if v.slots else "-")
        for v in plan.variables
    ]
    yield from text_table([header, *table])
    totals = plan.totals()
    state = byte_size(max(parts)) if len(parts) == 1 else f"at most {byte_size(max(parts))}"
    yield (
        f"On each process: parameters {byte_size(totals['parameters'])}, gradients {byte_size(totals['gradients'])}, "
        f"optimizer state {state}, activations {byte_size(totals['activations'])}"
    )
    if len(parts) > 1:
        yield f"Optimizer state, sharded over {len(parts)} replicas: {describe_parts(parts)}"
    yield f"Gradients of {byte_size(totals['gradients'])} are summed over the replicas once per step."
    if len(parts) > 1:
        yield f"Updated weights of {byte_size(totals['gradients'])} are gathered from them once per step."


def _notes(config: LayoutConfig) -> Iterator[str]:
    if "16" in config.precision:
        yield "Gradients and activations are counted in 32 bits, although layers that compute in 16 bits have theirs in 16."


def _facts(plan: "Plan", parts: Sequence[int], rows: int, config: LayoutConfig) -> dict[str, Any]:
    totals = plan.totals()
    return {
        "strategy": config.strategy,
        "processes": config.processes,
        "shard": config.shard,
        "process_bytes": {kind: totals[kind] for kind in ("parameters", "gradients", "activations")},
        "optimizer_state_bytes": [parts[rank % len(parts)] for rank in range(config.processes)],
        "variables": [
            {"path": v.path, "shape": list(v.shape), "bytes": v.bytes, "optimizer_state_bytes": _state_bytes(v)}
            for v in plan.variables
        ],
        "micro_steps_per_step": config.accumulate_steps,
        "micro_step_examples": rows,
    }
