"""Compares the collective calls of all processes after tracing a step and before running it."""

import hashlib
from collections.abc import Sequence

from tfdist.collectives import RecordedCall
from tfdist.coordination import Group
from tfdist.coordination.all_equal import all_equal
from tfdist.errors import InputError

TRACING_SECONDS = 600.0  # by which tracing may take longer on one process than on another
_MOST_LINES = 2000  # sent when plans differ


def agree_on_plan(group: Group, calls: Sequence[RecordedCall]) -> None:
    """Checks that every process makes the same calls in the same order; called after the step has been traced.

    The ranks of a group must make the same calls of it, in the same order, and each message must have a sender and a
    receiver, which may make them in another order.

    Args:
      group: processes whose replicas make the same calls. With groups of ranks, each has one replica.
      calls: calls that this process's replicas will make.

    Raises:
      InputError: on every process; names the first call that differs.
    """
    lines = [_line(call) for call in calls if call.ranks is None]
    if not all_equal(group, "plan", lines, TRACING_SECONDS):
        found = _first_difference(group, range(group.size), group.gather("plan/lines", lines[:_MOST_LINES]))
        raise _differ("All replicas", found)
    if group.size > 1:
        _agree_on_groups(group, [call for call in calls if call.ranks is not None])


def _agree_on_groups(group: Group, calls: Sequence[RecordedCall]) -> None:
    mine: dict[str, list[str]] = {}
    for call in calls:
        mine.setdefault(_name_of_group(call), []).append(_line(call))
    mine = {name: sorted(lines) if name.startswith(_MESSAGE) else lines for name, lines in mine.items()}
    digests = {name: hashlib.sha256("\n".join(lines).encode()).hexdigest() for name, lines in mine.items()}
    everyones = group.gather("plan/groups", digests)
    for name in sorted(set().union(*everyones)):
        ranks = _ranks_of_group(name)
        if len({everyones[rank].get(name) for rank in ranks}) > 1:
            everyone = group.gather(f"plan/{name}", mine.get(name, [])[:_MOST_LINES])
            raise _differ(f"Ranks {ranks}", _first_difference(group, ranks, everyone))


_MESSAGE = "message "


def _name_of_group(call: RecordedCall) -> str:
    ranks = ",".join(map(str, call.ranks or ()))
    return f"{_MESSAGE}{ranks}" if call.operation in ("send", "receive") else ranks


def _ranks_of_group(name: str) -> list[int]:
    return [int(rank) for rank in name.removeprefix(_MESSAGE).split(",")]


def _differ(who: str, found: str) -> InputError:
    return InputError(
        f"{who} must make the same calls of collectives. Received as call {found}. Use the same model, data and flags on "
        "every process."
    )


def _line(call: RecordedCall) -> str:
    shapes = ", ".join(f"{d.name}{list(shape)}" for d, shape in zip(call.dtypes, call.shapes, strict=True))
    operation = "message" if call.operation in ("send", "receive") else call.operation
    return f"{operation} {call.name} of {shapes or 'nothing'}"


def _first_difference(group: Group, compared: Sequence[int], everyone: Sequence[Sequence[str]]) -> str:
    for number in range(_MOST_LINES):
        ranks: dict[str, list[int]] = {}
        for rank in compared:
            lines = everyone[rank]
            ranks.setdefault(lines[number] if number < len(lines) else "none", []).append(rank)
        if len(ranks) > 1:
            return f"{number}: " + "; ".join(f"{group.named(found)}: {line}" for line, found in ranks.items())
    return f"{_MOST_LINES} or later: they differ there"
