"""Process sets: the sets of ranks that make a call. If Horovod is installed, these are its own classes."""

from collections.abc import Sequence
from typing import Any

from tfdist.errors import InputError

try:
    from horovod.common.process_sets import ProcessSet, global_process_set
except ImportError:

    class ProcessSet:  # type: ignore[no-redef]
        """All ranks of the job, which are in `ranks` after `init`; a smaller set needs Horovod."""

        process_set_id = 0

        def __init__(self, ranks_or_comm: Sequence[int]):
            if list(ranks_or_comm):
                raise InputError(
                    f"A process set of some ranks needs Horovod. Received: ProcessSet({ranks_or_comm!r}). "
                    "Run `tfdist install_horovod`, or remove process_set."
                )
            self.ranks: list[int] = []
            self._rank: int | None = None

        def set_ranks(self, rank: int, size: int) -> None:
            """Sets the ranks and this process's rank; called by `init`."""
            self.ranks, self._rank = list(range(size)), rank

        def size(self) -> int | None:
            """Returns the number of ranks in the set; None before `init`."""
            return len(self.ranks) or None

        def rank(self) -> int | None:
            """Returns the index of this process in the set; None before `init`."""
            return self._rank

        def included(self) -> bool | None:
            """Returns whether this process is in the set; None before `init`."""
            return None if self._rank is None else True

    global_process_set = ProcessSet([])


def ranks_of(process_sets: Any, size: int) -> list[list[int]]:
    """Returns the ranks of the process sets passed to `init`, except for MPI communicators and "dynamic".

    Horovod validates sets when it starts, and a process in which this fails cannot start it again.

    Raises:
      InputError: a rank is not in the job, which may have fewer processes than the program expects.
    """
    if process_sets is None or isinstance(process_sets, str):
        return []
    rank_lists = [list(process_set.ranks) for process_set in process_sets if process_set.ranks is not None]
    for ranks in rank_lists:
        if not ranks or not set(ranks) <= set(range(size)):
            raise InputError(
                f"A process set must have ranks from 0 to {size - 1}. Received: {ranks}. Remove the other ranks."
            )
    return rank_lists
