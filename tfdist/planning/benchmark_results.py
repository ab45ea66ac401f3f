"""Measurements of collectives, with bandwidths as in the NCCL tests. Does not import TensorFlow."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.config.all_reduce import ENGINE
from tfdist.errors import byte_size

SCHEMA = 2

# By operation: bytes on the busiest link per byte of the operation, for N replicas. With it, bandwidths of operations can be
# compared with each other and with that of the hardware.
TRAFFIC: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measured time of one operation.

    Attributes:
      operation: a key of `TRAFFIC`.
      bytes: size as in the NCCL tests: of each replica's tensor for all_reduce and broadcast, of the result on every
        replica for all_gather, of the input of every replica for reduce_scatter and all_to_all, 0 for barrier.
      dtype: dtype of the elements.
      strategy: name of the strategy.
      replicas: number of replicas.
      calls: number of consecutive calls per repeat.
      seconds: for each repeat, mean seconds per call on the slowest process.
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
        """Name of the measurement in tables: the algorithm, if any, or else the operation."""
        return self.algorithm or self.operation

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds)

    @property
    def algorithm_bandwidth(self) -> float:
        """Median bytes per second."""
        return self.bytes / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Median bytes per second on the busiest link, assuming an optimal algorithm."""
        return self.algorithm_bandwidth * TRAFFIC[self.operation](self.replicas)

    def record(self) -> dict[str, Any]:
        """Returns the JSON values of a line of collectives.jsonl."""
        return {
            "schema": SCHEMA,
            **dataclasses.asdict(self),
            "algorithm": self.algorithm or ENGINE,
            "seconds": list(self.seconds),
            "seconds_median": self.median,
            "seconds_min": min(self.seconds),
            "algorithm_bytes_per_second": self.algorithm_bandwidth,
            "bus_bytes_per_second": self.bus_bandwidth,
        }


_ROW = "{:16}{:>11}{:>12}{:>12}{:>16}{:>12}"


def header(first: str = "operation") -> str:
    """Returns the header line; `first` is the title of the first column."""
    return _ROW.format(first, "size", "median ms", "min ms", "algorithm GB/s", "bus GB/s")


def row(measurement: Measurement) -> str:
    """Returns the line of a measurement; a barrier has no size and no bandwidth."""
    # Imported late, because parsing a command's flags must not load NumPy.
    from tfdist.reporting.plain_reporter import format_number

    cells = ["-"] * 3
    if measurement.bytes:
        bandwidths = (measurement.algorithm_bandwidth, measurement.bus_bandwidth)
        cells = [byte_size(measurement.bytes), *(format_number(bandwidth / 1e9) for bandwidth in bandwidths)]
    times = [format_number(seconds * 1e3) for seconds in (measurement.median, min(measurement.seconds))]
    return _ROW.format(measurement.label, cells[0], *times, *cells[1:])
