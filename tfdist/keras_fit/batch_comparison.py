"""Compares over processes the batches that they read, which must be the same in the same order."""

from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError

COMPARE_EVERY = 100  # maximum number of batches between two comparisons


def next_comparison(compared: int) -> int:
    """Returns the number of batches of a pass after which to compare again: 1, 2, 4, ... 128, then every `COMPARE_EVERY`.

    What is wrong from the start is found at once, and long passes are not slowed down: a comparison costs a message.

    Args:
      compared: number of batches compared so far.
    """
    return compared + max(1, min(compared, COMPARE_EVERY))


class BatchComparison:
    """Compares the batches of one pass by their checksums. All processes must call each method together."""

    def __init__(self, checksums: dict[int, int], strategy: Strategy, name: str, deadline: float):
        """Initializes the comparison.

        Args:
          checksums: by number of batch, for batches that were read; those compared are removed.
          strategy: strategy whose processes have read them.
          name: name of the pass.
          deadline: seconds to wait for the other processes.
        """
        self._checksums, self._strategy, self._name, self._deadline = checksums, strategy, name, deadline
        self._compared, self._next = 0, next_comparison(0)

    def took(self, taken: int, ends: bool) -> None:
        """Compares the batches since the last comparison if that is due.

        Args:
          taken: number of batches taken so far.
          ends: whether the pass ends here.

        Raises:
          InputError: the batches differ.
        """
        if self._strategy.cluster.size > 1 and self._compared < taken and (ends or taken >= self._next):
            self._compare(taken)

    def ended(self) -> None:
        """Compares all batches that were read and not compared yet, because there are no more.

        Raises:
          InputError: the batches differ.
        """
        self.took(max(self._checksums, default=-1) + 1, ends=True)

    def _compare(self, taken: int) -> None:
        first, self._compared, self._next = self._compared, taken, next_comparison(taken)
        mine, peers = [self._checksums.pop(number) for number in range(first, taken)], self._strategy.peers
        if not peers.all_equal(f"batch/{self._name}/{first}", mine, self._deadline):
            batches = f"batch {first}" if taken == first + 1 else f"batches {first} to {taken - 1}"
            raise InputError(
                "Every process must read the same batches, in the same order: each keeps its replicas' rows of them. "
                f"Received: a difference between the {peers.size} processes in {batches} of {self._name}. Call "
                "keras.utils.set_random_seed before the data is shuffled, and leave out sharding by rank "
                "and parallel maps that draw random numbers."
            )
