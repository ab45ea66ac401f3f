"""Print the memory per device and the communication per step of a --mesh_shape, --layout and --shard, without training."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.cli import command, flags, tensorflow_import
from tfdist.config.fields import AUTO
from tfdist.config.train_config import LayoutConfig
from tfdist.errors.byte_sizes import byte_size
from tfdist.sharding.layouts import Shard, idle, parse_layout, parse_shard, rules_text, why_replicated

if TYPE_CHECKING:
    from tfdist.planner.layout_plan import Plan, Planned

_SHOWN = 3  # paths per group of variables


def main(config: LayoutConfig) -> int:
    """Prints the plan."""
    tensorflow_import.load_tensorflow()  # imported late, so that flags are parsed and help is printed before
    import keras

    from tfdist import data, models
    from tfdist.cli.session import sizes
    from tfdist.data import check_equal_shares
    from tfdist.layers.recompute import NONE, recompute
    from tfdist.optimizers.catalog import create_optimizer
    from tfdist.planner import layout_plan
    from tfdist.sharding.mesh import mesh_of

    def make() -> Any:
        optimizer = create_optimizer(config.optimizer, config.learning_rate, config.momentum_correction)
        return recompute(models.build(config.model, *sizes(whole)), config.recompute), optimizer

    if config.precision != "float32":
        keras.config.set_dtype_policy(config.precision)
    whole = data.load(config.dataset, config.data_dir)
    abstract_model = layout_plan.AbstractModel(make)
    mesh = mesh_of(config.mesh_shape, 0 if config.mesh_shape else config.devices)
    chosen = parse_layout("" if config.layout == AUTO else config.layout, mesh)
    check_equal_shares(config.batch_size, mesh.axes[chosen["batch"]], config.accumulate_steps)
    rows = config.batch_size // config.accumulate_steps
    shard = parse_shard(config.shard, config.shard_axis or chosen["batch"], config.shard_min_elements, mesh)
    if config.layout == AUTO:
        chosen, found = layout_plan.cheapest(abstract_model, mesh, chosen, shard, rows, config.memory_gb * 2**30)
        print(f"--layout={rules_text(chosen)}")
    else:
        found = abstract_model.plan(mesh, chosen, shard, rows)
    for line in _lines(found, chosen, shard, layout_plan.uncounted(chosen), config.accumulate_steps):
        print(line)
    if config.recompute != NONE:
        print("Not counted: communication that --recompute repeats.")
    if "16" in config.precision:
        print(
            "Gradients and activations are counted in 32 bits, although layers that compute in 16 bits send theirs in "
            "16."
        )
    return 0


def _lines(
    found: "Plan", rules: Mapping[str, str], shard: Shard, missing: Sequence[str], micro_steps: int
) -> Iterator[str]:
    header = ("variable", "dims", "shape", "computed", "stored", "optimizer", "per device")
    rows = [
        (
            v.path,
            " ".join(v.dims),
            "x".join(map(str, v.shape)),
            str(v.placement.computed),
            str(v.placement.stored),
            str(v.placement.slots) if v.slots else "-",
            byte_size(v.on_a_device(found.mesh)["parameters"]),
        )
        for v in found.variables
    ]
    yield f"Mesh {found.mesh}; rules {'; '.join(f'{dim}:{axis}' for dim, axis in rules.items())}"
    yield from _table([header, *rows])
    yield from _whole(found, shard)
    yield ""
    totals = {kind.replace("slots", "optimizer state"): size for kind, size in found.totals().items()}
    yield "On each device: " + ", ".join(f"{kind} {byte_size(size)}" for kind, size in totals.items())
    for line in idle(rules, found.dims, shard, found.mesh):
        yield f"Warning: {line}"
    if found.sent:
        each = f"each of the {micro_steps} micro-steps of a step" if micro_steps > 1 else "a step"
        yield f"Collectives of {each}, with the bytes of the tensor on each device:"
        once = {"updated variables": "updated variables, once per step"} if micro_steps > 1 else {}
        sent = [(once.get(one.what, one.what), one.kind, one.axis, byte_size(one.bytes)) for one in found.sent]
        yield from _table([("what", "operation", "axis", "bytes"), *sent])
    if found.unknown:
        yield f"Not counted: communication and memory of these nested layers: {', '.join(found.unknown)}."
    if found.unclear:
        yield f"Not fully counted: communication of layers that the engine lays out: {', '.join(found.unclear)}."
    if missing:
        yield f"Not counted: communication caused by {'; '.join(missing)}."


def _whole(found: "Plan", shard: Shard) -> Iterator[str]:
    """Yields lines about variables that are not sharded, by reason."""
    reasons: dict[str, list[Planned]] = {}
    for v in found.variables:
        if v.is_replicated(found.mesh):
            reasons.setdefault(why_replicated(v.shape, v.trainable, v.slots, found.mesh, shard), []).append(v)
    for why, variables in reasons.items():
        paths = ", ".join(v.path for v in variables[:_SHOWN]) + (", ..." if len(variables) > _SHOWN else "")
        count = f"{len(variables)} variable{'s' if len(variables) > 1 else ''}"
        yield f"Replicated on each device: {count}, {byte_size(sum(v.bytes for v in variables))}, {why} ({paths})"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(
        command.run(
            "layout",
            lambda values: flags.define(values, LayoutConfig),
            lambda values: main(flags.config(values, LayoutConfig)),
            about=__doc__,
        )
    )
