"""Prints which parameter server holds which variables, for `tfdist layout`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.cli import tensorflow_import
from tfdist.cli.output import Output, text_table
from tfdist.config.layout_config import LayoutConfig
from tfdist.config.staleness import SYNC, parse_staleness
from tfdist.errors.numbers import byte_size, count_of
from tfdist.sharding.layouts import Shard
from tfdist.sharding.mesh import Mesh

if TYPE_CHECKING:
    from tfdist.planning.layout_plan import Plan, VariablePlan

_AXIS = "data"


def main(config: LayoutConfig, output: Output) -> int:
    """Prints the plan."""
    tensorflow_import.load_tensorflow()
    from tfdist import keras_internals
    from tfdist.cli.planned_model import planned_model
    from tfdist.parameter_server.servers import by_size

    is_whole = parse_staleness(config.staleness).kind != SYNC  # a worker computes the whole batch of a step
    workers = 1 if is_whole else config.processes
    rows = -(-config.batch_size // (workers * config.accumulate_steps))
    abstract = planned_model(config)
    plan = abstract.plan(Mesh({_AXIS: workers}), {"batch": _AXIS}, Shard(axis=_AXIS), rows * workers)
    plans = {id(variable): planned for variable, planned in zip(abstract.variables, plan.variables, strict=True)}
    states = keras_internals.moving_statistics(abstract.model) if is_whole else []
    held = [plans[id(variable)] for variable in (*abstract.model.trainable_variables, *states)]
    placement = by_size([variable.bytes for variable in held], max(config.servers, 1))
    for line in _lines(plan, held, placement, rows, config):
        output.line(line)
    output.result(_facts(plan, held, placement, rows, config))
    return 0


def _lines(
    plan: "Plan", held: Sequence["VariablePlan"], placement: Sequence[int], rows: int, config: LayoutConfig
) -> Iterator[str]:
    workers, servers = count_of(config.processes, "worker"), count_of(max(config.servers, 1), "server")
    yield f"{config.strategy} with {workers} and {servers}, at most {rows} examples of a step on each"
    header = ("variable", "shape", "bytes", "optimizer", "server")
    table = [
        (v.path, "x".join(map(str, v.shape)), byte_size(v.bytes), byte_size(_state_bytes(v)), str(server))
        for v, server in zip(held, placement, strict=True)
    ]
    yield from text_table([header, *table])
    for number, (variables, state) in enumerate(_loads(held, placement, config)):
        yield f"On server {number}: variables {byte_size(variables)}, optimizer state {byte_size(state)}"
    totals = plan.totals()
    yield (
        f"On each worker: parameters {byte_size(totals['parameters'])}, gradients {byte_size(totals['gradients'])}, "
        f"activations {byte_size(totals['activations'])}, no optimizer state"
    )
    pulled = byte_size(sum(variable.bytes for variable in held))
    yield f"For a step, a worker pulls {pulled} and pushes gradients of {byte_size(totals['gradients'])}."


def _state_bytes(variable: "VariablePlan") -> int:
    return variable.slots * variable.bytes


def _loads(held: Sequence["VariablePlan"], placement: Sequence[int], config: LayoutConfig) -> Iterator[tuple[int, int]]:
    """Yields the bytes of variables and of the optimizer's state on each server."""
    for number in range(max(config.servers, 1)):
        own = [variable for variable, server in zip(held, placement, strict=True) if server == number]
        yield sum(variable.bytes for variable in own), sum(map(_state_bytes, own))


def _facts(
    plan: "Plan", held: Sequence["VariablePlan"], placement: Sequence[int], rows: int, config: LayoutConfig
) -> dict[str, Any]:
    totals = plan.totals()
    loads = _loads(held, placement, config)
    return {
        "strategy": config.strategy,
        "workers": config.processes,
        "servers": [{"variable_bytes": size, "optimizer_state_bytes": state} for size, state in loads],
        "worker_bytes": {kind: totals[kind] for kind in ("parameters", "gradients", "activations")},
        "variables": [
            {"path": v.path, "shape": list(v.shape), "bytes": v.bytes, "server": server}
            for v, server in zip(held, placement, strict=True)
        ],
        "step_examples": rows,
    }
