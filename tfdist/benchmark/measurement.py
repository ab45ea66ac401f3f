"""The measurement of one operation at one size, with bandwidths as defined by the NCCL tests. Without TensorFlow."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.grammar.all_reduce import ENGINE

SCHEMA = 2

# By operation: bytes on the busiest link per byte of the operation, with N replicas. Makes bandwidths comparable
# between operations, and with that of the hardware.
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
    """The measured time of one operation.

    Attributes:
      operation: a key of `TRAFFIC`.
      bytes: size as in the NCCL tests: of each replica's tensor for all_reduce and broadcast, of the result on every
        replica for all_gather, of the input of every replica for reduce_scatter and all_to_all, 0 for barrier.
      dtype: dtype of the elements.
      strategy: strategy, as in `--strategy`.
      replicas: number of replicas.
      calls: number of consecutive calls per repeat.
      seconds: seconds per call, by repeat: the mean over its calls, on the slowest process.
      algorithm: all-reduce algorithm, if several are compared; empty for the engine's operation.
    """

    operation: str
    bytes: int
    dtype: str
    strategy: str
    replicas: int
    calls: int
    seconds: tuple[float, ...]
    algorithm: str = ""

    @property
    def label(self) -> str:
        """Name of what was measured, among others of the same benchmark."""
        return self.algorithm or self.operation

    @property
    def median(self) -> float:
        """Seconds per call, median over the repeats."""
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        """Seconds per call, minimum over the repeats."""
        return min(self.seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second, by the median."""
        return self.bytes / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second on the busiest link, by the median, assuming an optimal algorithm."""
        return self.algorithm_bandwidth * TRAFFIC[self.operation](self.replicas)

    def record(self) -> dict[str, Any]:
        """Returns one line of collectives.jsonl."""
        return {
            "schema": SCHEMA,
            **dataclasses.asdict(self),
            "algorithm": self.algorithm or ENGINE,
            "seconds": list(self.seconds),
            "seconds_median": self.median,
            "seconds_min": self.least,
            "algorithm_bytes_per_second": self.algorithm_bandwidth,
            "bus_bytes_per_second": self.bus_bandwidth,
        }
