"""Division of a list of variables into parts of about equal size. Does not use TensorFlow."""

from collections.abc import Sequence
from typing import NamedTuple

from tfdist.errors import InputError
from tfdist.errors.formatting import byte_size

_SHOWN = 8  # parts of which each is listed
_UNBALANCED = 1.1  # largest part over the mean, from which on it is shown


class Piece(NamedTuple):
    """A variable in a message.

    Attributes:
      number: number of the variable.
      start: its first element in the vector of its owner.
    """

    number: int
    start: int


class Message(NamedTuple):
    """One exchange, in which all owners send vectors of one length.

    Attributes:
      length: elements of each vector; shorter ones are padded.
      pieces: for each owner, the variables in its vector.
    """

    length: int
    pieces: list[list[Piece]]


def balanced_owners(sizes: Sequence[int], parts: int) -> list[int]:
    """Returns which of several owners gets each variable: the largest first, to the one that has least so far.

    The size of the largest part is at most 4/3 of that in the best division (Graham, 1969). The first owner has the largest
    variable, so that only others may have none.

    Args:
      sizes: size of each variable.
      parts: number of owners.

    Raises:
      InputError: there are variables, but fewer than owners.
    """
    if 0 < len(sizes) < parts:
        raise InputError(
            f"--shard=optimizer needs a trained variable for each replica. Received: {len(sizes)} variables, {parts} replicas. "
            "Leave out --shard."
        )
    loads = [0] * parts
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += sizes[number]
    return owners


def sizes_of_parts(sizes: Sequence[int], state: Sequence[int], parts: int) -> list[int]:
    """Returns the size of the optimizer's state that each owner has.

    Args:
      sizes: size of each variable, by which they are divided.
      state: size of the optimizer's state for each.
      parts: number of owners.

    Raises:
      InputError: there are variables, but fewer than owners.
    """
    totals = [0] * parts
    for owner, size in zip(balanced_owners(sizes, parts), state, strict=True):
        totals[owner] += size
    return totals


def describe_parts(sizes: Sequence[int]) -> str:
    """Returns for example `215.0 KiB + 214.1 KiB`, and by how much the largest part exceeds the mean, if it does.

    Args:
      sizes: bytes of each part.
    """
    text = " + ".join(map(byte_size, sizes)) if len(sizes) <= _SHOWN else f"at most {byte_size(max(sizes))} each"
    excess = max(sizes) * len(sizes) / max(1, sum(sizes))
    unbalanced = f"; the largest is {excess:.2g} times the mean, because variables are not divided"
    return text + (unbalanced if excess > _UNBALANCED else "")


def messages(sizes: Sequence[int], owners: Sequence[int], parts: int, least: int) -> list[Message]:
    """Returns the messages in which all owners send their variables to all, with little padding.

    Each owner sends its largest variables first, so that those of a message have similar sizes.

    Args:
      sizes: number of elements of each variable.
      owners: owner of each.
      parts: number of owners.
      least: number of elements up to which small variables share a message.
    """
    queues = [
        sorted((i for i, owner in enumerate(owners) if owner == part), key=lambda i: -sizes[i]) for part in range(parts)
    ]
    result = []
    while any(queues):
        limit = max(least, *(sizes[queue[0]] for queue in queues if queue))
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
