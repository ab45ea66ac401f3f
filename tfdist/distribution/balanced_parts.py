"""Divides a list of variables into parts of about equal size, without TensorFlow."""

import itertools
from collections.abc import Mapping, Sequence

from tfdist.errors import InputError, byte_size

_MAX_LISTED = 8  # if there are more parts, only the largest is shown
_MAX_IMBALANCE = 1.1  # ratio of the largest part to the mean above which it is shown


def place_by_size(sizes: Sequence[int], parts: int) -> list[int]:
    """Returns the part of each variable: the largest variables first, each to the part with the smallest total.

    The largest part is at most 4/3 of the optimum (Graham, 1969). The first part has the largest variable.
    """
    totals, placement = [0] * parts, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        placement[index] = totals.index(min(totals))
        totals[placement[index]] += sizes[index]
    return placement


def balanced_owners(sizes: Sequence[int], parts: int) -> list[int]:
    """Returns the owner of each variable; see `place_by_size`.

    Raises:
      InputError: there are fewer variables than owners, and at least one variable.
    """
    if 0 < len(sizes) < parts:
        raise InputError(
            f"--shard=optimizer needs at least one trainable variable per replica. Received: {len(sizes)} variables, {parts} "
            "replicas. Remove --shard."
        )
    return place_by_size(sizes, parts)


def sizes_of_parts(sizes: Sequence[int], state_sizes: Sequence[int], parts: int) -> list[int]:
    """Returns the size of each owner's optimizer state, given `state_sizes` by variable; see `balanced_owners`."""
    totals = [0] * parts
    for owner, size in zip(balanced_owners(sizes, parts), state_sizes, strict=True):
        totals[owner] += size
    return totals


def describe_parts(sizes: Sequence[int]) -> str:
    """Formats sizes in bytes as in `215.0 KiB + 214.1 KiB`, with a note if the parts are unbalanced."""
    text = " + ".join(map(byte_size, sizes)) if len(sizes) <= _MAX_LISTED else f"at most {byte_size(max(sizes))} each"
    excess = max(sizes) * len(sizes) / max(1, sum(sizes))
    note = f"; the largest is {excess:.2g} times the mean, because variables are not divided"
    return text + (note if excess > _MAX_IMBALANCE else "")


def exchanges(
    sizes: Mapping[int, int], owners: Sequence[int], parts: int, bucket_elements: int
) -> list[list[list[int]]]:
    """Returns the indices of the variables that each owner sends to all others in each exchange: [exchange][owner].

    In an exchange, the vectors of all owners are padded to the same length. Each owner sends its largest variables first, so
    that little padding is needed. Variables share a vector of up to `bucket_elements`; a larger variable has its own. `sizes`
    has their numbers of elements, by index.
    """
    queues = [
        sorted((i for i in sizes if owners[i] == part), key=lambda i: sizes[i], reverse=True) for part in range(parts)
    ]
    result = []
    while any(queues):
        limit = max(bucket_elements, *(sizes[queue[0]] for queue in queues if queue))
        counts = [sum(end <= limit for end in itertools.accumulate(sizes[i] for i in queue)) for queue in queues]
        result.append([queue[:count] for queue, count in zip(queues, counts, strict=True)])
        queues = [queue[count:] for queue, count in zip(queues, counts, strict=True)]
    return result
