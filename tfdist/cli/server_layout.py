"""Prints which parameter server holds which variables, for `tfdist layout`."""

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tfdist.cli import tensorflow_import
from tfdist.cli.output import Output, text_table
from tfdist.config.layout_config import LayoutConfig
from tfdist.config.layouts import Shard
from tfdist.config.mesh import Mesh
from tfdist.config.staleness import SYNC, parse_staleness
from tfdist.errors.formatting import byte_size, count_of

if TYPE_CHECKING:
    from tfdist.planning.layout_plan import VariablePlan

_AXIS = "data"


def main(config: LayoutConfig, output: Output) -> int:
    """Prints the plan."""
    tensorflow_import.load_tensorflow()
    from tfdist import keras_internals
    from tfdist.cli.planned_model import planned_model
    from tfdist.parameter_server.embedding_tables import is_table
    from tfdist.parameter_server.servers import placement_of

    is_whole = parse_staleness(config.staleness).kind != SYNC  # a worker computes the whole batch of a step
    workers, servers = 1 if is_whole else config.processes, max(config.servers, 1)
    rows = -(-config.batch_size // (workers * config.accumulate_steps))
    abstract = planned_model(config)
    plan = abstract.plan(Mesh({_AXIS: workers}), {"batch": _AXIS}, Shard(axis=_AXIS), rows * workers)
    plans = {id(variable): planned for variable, planned in zip(abstract.variables, plan.variables, strict=True)}
    states = keras_internals.moving_statistics(abstract.model) if is_whole else []
    held = [*abstract.model.trainable_variables, *states]
    layers = [v for v in keras_internals.layers_of(abstract.model) if is_table(v, config.min_table_bytes, servers)]
    tables = {id(keras_internals.kernel_of(layer)) for layer in layers}
    numbers = [number for number, variable in enumerate(held) if id(variable) in tables]
    placement = placement_of([plans[id(variable)].bytes for variable in held], numbers, servers)
    placed = [(plans[id(variable)], server) for variable, server in zip(held, placement, strict=True)]
    split = sum(variable.bytes for variable, server in placed if server < 0)
    totals = plan.totals()
    facts = {
        "strategy": config.strategy,
        "workers": config.processes,
        "servers": [_load(placed, server, servers) for server in range(servers)],
        "worker_bytes": {
            "parameters": totals["parameters"] - split,
            "gradients": totals["gradients"] - split,
            "activations": totals["activations"],
        },
        "variables": [
            {"path": v.path, "shape": list(v.shape), "bytes": v.bytes, "server": None if server < 0 else server}
            for v, server in placed
        ],
        "step_examples": rows,
    }
    for line in _lines(placed, facts):
        output.line(line)
    output.result(facts)
    return 0


def _load(placed: "list[tuple[VariablePlan, int]]", server: int, servers: int) -> dict[str, int]:
    """Returns the bytes on a server, of variables that are on it and of its rows of tables."""
    from tfdist.parameter_server.table_rows import count_rows

    own = [(variable.bytes, variable.slots) for variable, number in placed if number == server]
    tables = [variable for variable, number in placed if number < 0]
    own += [(v.bytes // v.shape[0] * count_rows(v.shape[0], server, servers), v.slots) for v in tables]
    state = sum(size * slots for size, slots in own)
    return {"variable_bytes": sum(size for size, _ in own), "optimizer_state_bytes": state}


def _row(variable: "VariablePlan", server: int) -> tuple[str, ...]:
    shape, sizes = "x".join(map(str, variable.shape)), (variable.bytes, variable.slots * variable.bytes)
    return (variable.path, shape, *map(byte_size, sizes), "by rows" if server < 0 else str(server))


def _lines(placed: "list[tuple[VariablePlan, int]]", facts: Mapping[str, Any]) -> Iterator[str]:
    workers, servers = count_of(facts["workers"], "worker"), count_of(len(facts["servers"]), "server")
    yield f"{facts['strategy']} with {workers} and {servers}, at most {facts['step_examples']} examples of a step on each"
    yield from text_table([("variable", "shape", "bytes", "optimizer", "server"), *itertools.starmap(_row, placed)])
    for number, server in enumerate(facts["servers"]):
        variables, state = map(byte_size, server.values())
        yield f"On server {number}: variables {variables}, optimizer state {state}"
    sizes = {kind: byte_size(size) for kind, size in facts["worker_bytes"].items()}
    used = ", and the rows of tables that a step uses" if any(server < 0 for _, server in placed) else ""
    yield (
        "On each worker: " + ", ".join(f"{kind} {size}" for kind, size in sizes.items()) + f", no optimizer state{used}"
    )
    pulled = byte_size(sum(variable.bytes for variable, server in placed if server >= 0))
    yield f"For a step, a worker pulls {pulled} and pushes gradients of {sizes['gradients']}{used}."
