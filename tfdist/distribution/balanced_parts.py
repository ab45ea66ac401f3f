"""Divides a list of variables into parts of about equal size, without TensorFlow."""

from collections.abc import Sequence
from typing import NamedTuple

from tfdist.errors import InputError, byte_size

_MAX_LISTED = 8  # if there are more parts, only the largest is shown
_MAX_IMBALANCE = 1.1  # ratio of the largest part to the mean above which it is shown


class Piece(NamedTuple):
    """A variable in a message.

    Attributes:
      number: index of the variable.
      start: position of its first element in the vector of its owner.
    """

    number: int
    start: int


class Message(NamedTuple):
    """One exchange, in which all owners send vectors of the same length.

    Attributes:
      length: elements of each vector; shorter ones are padded.
      pieces: for each owner, the variables in its vector.
    """

    length: int
    pieces: list[list[Piece]]


def place_by_size(sizes: Sequence[int], parts: int) -> list[int]:
    """Returns the part of each variable: the largest variables first, each to the part with the smallest total.

    The largest part is at most 4/3 of the optimum (Graham, 1969). The first part has the largest variable.
    """
    loads, placement = [0] * parts, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        placement[number] = loads.index(min(loads))
        loads[placement[number]] += sizes[number]
    return placement


def balanced_owners(sizes: Sequence[int], parts: int) -> list[int]:
    """Returns the owner of each variable; see `place_by_size`.

    Args:
      sizes: size of each variable.
      parts: number of owners.

    Raises:
      InputError: there are fewer variables than owners, but at least one.
    """
    if 0 < len(sizes) < parts:
        raise InputError(
            f"--shard=optimizer needs a trained variable for each replica. Received: {len(sizes)} variables, {parts} replicas. "
            "Leave out --shard."
        )
    return place_by_size(sizes, parts)


def sizes_of_parts(sizes: Sequence[int], state: Sequence[int], parts: int) -> list[int]:
    """Returns the size of the optimizer state of each owner.

    Args:
      sizes: size of each variable, by which the parts are balanced.
      state: size of each variable's optimizer state.
      parts: number of owners.

    Raises:
      InputError: there are fewer variables than owners, but at least one.
    """
    totals = [0] * parts
    for owner, size in zip(balanced_owners(sizes, parts), state, strict=True):
        totals[owner] += size
    return totals


def describe_parts(sizes: Sequence[int]) -> str:
    """Formats sizes in bytes as in `215.0 KiB + 214.1 KiB`, with a note if the parts are unbalanced."""
    text = " + ".join(map(byte_size, sizes)) if len(sizes) <= _MAX_LISTED else f"at most {byte_size(max(sizes))} each"
    excess = max(sizes) * len(sizes) / max(1, sum(sizes))
    note = f"; the largest is {excess:.2g} times the mean, because variables are not divided"
    return text + (note if excess > _MAX_IMBALANCE else "")


def messages(sizes: Sequence[int], owners: Sequence[int], parts: int, min_elements: int) -> list[Message]:
    """Returns the messages in which each owner sends its variables to all other owners, with little padding.

    Each owner sends its largest variables first, so the variables in a message have similar sizes.

    Args:
      sizes: number of elements of each variable.
      owners: owner of each variable.
      parts: number of owners.
      min_elements: number of elements up to which small variables share a message.
    """
    queues = [
        sorted((i for i, owner in enumerate(owners) if owner == part), key=lambda i: -sizes[i]) for part in range(parts)
    ]
    result = []
    while any(queues):
        limit = max(min_elements, *(sizes[queue[0]] for queue in queues if queue))
        vectors = [_pop_pieces(queue, sizes, limit) for queue in queues]
        result.append(Message(max(length for _, length in vectors), [pieces for pieces, _ in vectors]))
    return result


def _pop_pieces(queue: list[int], sizes: Sequence[int], limit: int) -> tuple[list[Piece], int]:
    pieces, length = [], 0
    while queue and length + sizes[queue[0]] <= limit:
        number = queue.pop(0)
        pieces.append(Piece(number, length))
        length += sizes[number]
    return pieces, length
