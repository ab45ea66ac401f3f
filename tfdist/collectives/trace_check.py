"""Compares the collective calls of all processes after tracing a step and before running it."""

from collections.abc import Sequence

from tfdist.collectives import RecordedCall
from tfdist.coordination import Group
from tfdist.coordination.group import name_ranks
from tfdist.errors import InputError

TRACING_SECONDS = 600.0  # maximum difference of tracing times between processes


def agree_on_plan(group: Group, calls: Sequence[RecordedCall]) -> None:
    """Checks that every process makes the same calls in the same order; called after the step has been traced.

    The same holds for the ranks of a group. Each message must have a sender and a receiver, in any order.

    Args:
      group: processes whose replicas make the same calls. With groups of ranks, each process has one replica.
      calls: calls that this process's replicas will make.

    Raises:
      InputError: the calls differ. Raised on every process, with the first call that differs.
    """
    _compare(group, "plan", [_line(call) for call in calls if call.ranks is None], range(group.size), "All replicas")
    if group.size > 1:
        _agree_on_groups(group, [call for call in calls if call.ranks is not None])


def _agree_on_groups(group: Group, calls: Sequence[RecordedCall]) -> None:
    group_lines: dict[str, list[str]] = {}
    for call in calls:
        kind = _MESSAGE if call.operation in ("send", "receive") else ""
        group_lines.setdefault(kind + ",".join(map(str, call.ranks or ())), []).append(_line(call))
    for name in sorted(set().union(*group.gather("plan/groups", [*group_lines]))):
        lines, ranks = group_lines.get(name, []), [int(rank) for rank in name.removeprefix(_MESSAGE).split(",")]
        _compare(group, f"plan/{name}", sorted(lines) if name.startswith(_MESSAGE) else lines, ranks, f"Ranks {ranks}")


_MESSAGE = "message "


def _compare(group: Group, name: str, lines: Sequence[str], ranks: Sequence[int], subject: str) -> None:
    lines_by_index = {str(index): line for index, line in enumerate(lines)}
    if difference := group.difference(name, lines_by_index, TRACING_SECONDS, members=ranks):
        rank_lines = "; ".join(f"{name_ranks(line_ranks)}: {line}" for line, line_ranks in difference.ranks.items())
        received = rank_lines.replace('"', "")
        raise InputError(
            f"{subject} must make the same calls of collectives. Received as call {difference.key}: {received}. Use the same "
            "model, data and flags on every process."
        )


def _line(call: RecordedCall) -> str:
    shapes = ", ".join(f"{d.name}{list(shape)}" for d, shape in zip(call.dtypes, call.shapes, strict=True))
    operation = "message" if call.operation in ("send", "receive") else call.operation
    return f"{operation} {call.name} of {shapes or 'nothing'}"
