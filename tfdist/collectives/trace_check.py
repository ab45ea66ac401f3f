"""Compares the collective calls of all processes after tracing a step and before running it."""

from collections.abc import Sequence

from tfdist.collectives import RecordedCall
from tfdist.coordination import Group
from tfdist.coordination.all_equal import all_equal
from tfdist.errors import InputError

TRACING_SECONDS = 600.0  # by which tracing may take longer on one process than on another
_MOST_LINES = 2000  # sent when plans differ


def agree_on_plan(group: Group, calls: Sequence[RecordedCall]) -> None:
    """Checks that every process makes the same calls in the same order; called after the step has been traced.

    Args:
      group: processes whose replicas make the same calls.
      calls: calls that this process's replicas will make.

    Raises:
      InputError: on every process; names the first call that differs.
    """
    lines = [_line(call) for call in calls]
    if all_equal(group, "plan", lines, TRACING_SECONDS):
        return
    everyone = group.gather("plan/lines", lines[:_MOST_LINES])
    found = _first_difference(group, everyone)
    raise InputError(
        f"All replicas must make the same calls of collectives. Received as call {found}. "
        "Use the same model, data and flags on every process."
    )


def _line(call: RecordedCall) -> str:
    shapes = ", ".join(f"{d.name}{list(shape)}" for d, shape in zip(call.dtypes, call.shapes, strict=True))
    return f"{call.operation} {call.name} of {shapes or 'nothing'}"


def _first_difference(group: Group, everyone: Sequence[Sequence[str]]) -> str:
    for number in range(_MOST_LINES):
        ranks: dict[str, list[int]] = {}
        for rank, lines in enumerate(everyone):
            ranks.setdefault(lines[number] if number < len(lines) else "none", []).append(rank)
        if len(ranks) > 1:
            return f"{number}: " + "; ".join(f"{group.named(found)}: {line}" for line, found in ranks.items())
    return f"{_MOST_LINES} or later: they differ there"
