"""Sets of ranks among which an operation runs: Horovod's own where it is installed."""

from collections.abc import Sequence

from tfdist.errors import InputError

try:
    from horovod.common.process_sets import ProcessSet, global_process_set
except ImportError:

    class ProcessSet:  # type: ignore[no-redef]
        """All ranks of the job; a smaller set needs Horovod.

        Attributes:
          process_set_id: 0, that of all ranks.
          ranks: the ranks in it, once `init` was called.
        """

        process_set_id = 0

        def __init__(self, ranks_or_comm: Sequence[int]):
            """Args: ranks_or_comm: empty, for all ranks."""
            if list(ranks_or_comm):
                raise InputError(
                    f"A set of some ranks needs Horovod. Received: ProcessSet({ranks_or_comm!r}) without it. "
                    "Run `python -m tfdist.install_horovod`, or leave out process_set."
                )
            self.ranks: list[int] = []
            self._rank: int | None = None

        def settle(self, rank: int, size: int) -> None:
            """Called by `init`: which ranks there are, and which is this process's."""
            self.ranks, self._rank = list(range(size)), rank

        def size(self) -> int | None:
            """The number of ranks in it; None before `init`."""
            return len(self.ranks) or None

        def rank(self) -> int | None:
            """This process's number in it; None before `init`."""
            return self._rank

        def included(self) -> bool | None:
            """Whether this process is in it; None before `init`."""
            return None if self._rank is None else True

    global_process_set = ProcessSet([])


__all__ = ["ProcessSet", "global_process_set"]
