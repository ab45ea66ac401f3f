"""Prints what the axis `model` of a pipeline shards, for `tfdist layout`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfdist.cli.text_table import text_table
from tfdist.errors.byte_sizes import byte_size

if TYPE_CHECKING:
    from tfdist.planner.spread_plan import SpreadPlan

_SHOWN = 3  # paths of variables that are not sharded


def lines(spread: "SpreadPlan") -> Iterator[str]:
    """Yields the layouts of variables and the communication between the devices of a process."""
    mesh = spread.plan.mesh
    rows = [
        (
            v.path,
            " ".join(v.dims),
            "x".join(map(str, v.shape)),
            str(v.placement.computed),
            byte_size(v.on_a_device(mesh)["parameters"]),
        )
        for v in spread.sharded
    ]
    if rows:
        yield f"Sharded over the {spread.devices} devices of a process:"
        yield from text_table([("variable", "dims", "shape", "layout", "on a device"), *rows])
    if spread.replicated:
        found = spread.replicated
        paths = ", ".join(v.path for v in found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
        count = f"{len(found)} variable{'s' * (len(found) > 1)}"
        yield f"Replicated on each device: {count}, {byte_size(sum(v.bytes for v in found))} ({paths})"
    for warning in spread.warnings:
        yield f"Warning: {warning}"
    if spread.plan.sent:
        yield "Collectives of the devices for each micro-batch, with the size of the tensor on each device:"
        sent = [(one.what, one.kind, byte_size(one.bytes)) for one in spread.plan.sent]
        yield from text_table([("what", "operation", "size"), *sent])


def notes(spread: "SpreadPlan") -> Iterator[str]:
    """Yields what is not counted."""
    yield (
        "Variables, gradients and optimizer state are counted per device, activations as on one device without --layout. "
        "In addition, the host of a process stores its unsharded gradients while they are reduced."
    )
    if spread.plan.unknown:
        yield f"Not counted: communication of these nested layers: {', '.join(spread.plan.unknown)}."
    if spread.plan.unclear:
        yield f"Not fully counted: communication of layers that the engine lays out: {', '.join(spread.plan.unclear)}."


def facts(spread: "SpreadPlan | None") -> dict[str, Any]:
    """Returns the values of JSON; nothing is sharded over one device."""
    if spread is None:
        return {"layout": {}, "sharded_variables": [], "collectives": [], "warnings": []}
    return {
        "layout": dict(spread.rules),
        "sharded_variables": [
            {
                "path": v.path,
                "dims": list(v.dims),
                "shape": list(v.shape),
                "bytes": v.bytes,
                "layout": str(v.placement.computed),
                "device_bytes": v.on_a_device(spread.plan.mesh)["parameters"],
            }
            for v in spread.sharded
        ],
        "collectives": [
            {"what": one.what, "operation": one.kind, "axis": one.axis, "device_bytes": one.bytes}
            for one in spread.plan.sent
        ],
        "warnings": spread.warnings,
    }
