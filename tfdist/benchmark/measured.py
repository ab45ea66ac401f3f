"""One measured operation at one size, and its bandwidths as the NCCL tests define them. No TensorFlow."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

SCHEMA = 1

# By operation: how many bytes the busiest link carries for each byte that the operation is about, of N replicas. With it
# the bandwidths of all operations are about the links, and can be compared with each other and with the hardware's.
TRAFFIC: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """How long one operation takes.

    Attributes:
      operation: a key of `TRAFFIC`.
      bytes: what it is about, as in the NCCL tests: of each replica's tensor for all_reduce and broadcast, of the whole
        that every replica has at the end for all_gather, of what every replica hands over for reduce_scatter and
        all_to_all, 0 for barrier.
      dtype: of the elements.
      strategy: as in `--strategy`.
      replicas: how many took part.
      calls: one after the other in each repeat.
      seconds: a call's, by repeat: the mean of its calls, on the slowest process.
    """

    operation: str
    bytes: int
    dtype: str
    strategy: str
    replicas: int
    calls: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds a call, the middle repeat's."""
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        """Seconds a call, the fastest repeat's."""
        return min(self.seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second, by the median."""
        return self.bytes / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second on the busiest link, by the median, if the operation were done in the best way."""
        return self.algorithm_bandwidth * TRAFFIC[self.operation](self.replicas)

    def record(self) -> dict[str, Any]:
        """One line of collectives.jsonl."""
        return {
            "schema": SCHEMA,
            **dataclasses.asdict(self),
            "seconds": list(self.seconds),
            "seconds_median": self.median,
            "seconds_min": self.least,
            "algorithm_bandwidth": self.algorithm_bandwidth,
            "bus_bandwidth": self.bus_bandwidth,
        }
