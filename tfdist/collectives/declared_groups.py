"""The groups of ranks of a job of several processes, which are declared before its engine starts."""

import types
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tfdist.errors import InputError

Ranks = tuple[int, ...]
NO_SETS: Mapping[Ranks, object] = types.MappingProxyType({})
_Declared = TypeVar("_Declared")


def distinct_groups(groups: Sequence[Sequence[int]], size: int) -> list[Ranks]:
    """Returns the sets of ranks, each once, without those of one rank or of all, which need no declaration.

    Args:
      groups: ranks of each group, in any order.
      size: number of processes of the job.

    Raises:
      InputError: a group has a rank twice, or one that the job has not.
    """
    for ranks in groups:
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(size)):
            raise InputError(
                f"A group must consist of different ranks from 0 to {size - 1}. Received: {list(ranks)}. Correct groups."
            )
    distinct = dict.fromkeys(tuple(sorted(ranks)) for ranks in groups)
    return [ranks for ranks in distinct if 1 < len(ranks) < size]


def declared_group(declared: Mapping[Ranks, _Declared], ranks: Sequence[int]) -> _Declared:
    """Returns what belongs to a group.

    Raises:
      InputError: the group was not declared.
    """
    key = tuple(sorted(ranks))
    if key not in declared:
        known = ", ".join(str(list(each)) for each in declared) or "none"
        raise InputError(
            f"Groups must be declared when the strategy is created. Received: ranks {list(key)}; declared: {known}. Add "
            f"it: load_strategy(..., groups=[{list(key)}, ...])."
        )
    return declared[key]
