"""Measurements of collectives, with bandwidths as in the NCCL tests, in tables and figures. Does not import TensorFlow."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.config.all_reduce import ALGORITHMS, ENGINE
from tfdist.errors import byte_size
from tfdist.reporting.run_summary import describe_axes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SCHEMA = 2

# By operation: bytes on the busiest link per byte of the operation, for N replicas. This factor makes the bandwidths of
# operations comparable with each other and with the bandwidth of the hardware.
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
    """The measured time of one operation."""

    operation: str  # a key of `TRAFFIC`
    # Size as in the NCCL tests: of each replica's tensor for all_reduce and broadcast, of the result on every replica
    # for all_gather, of the input of every replica for reduce_scatter and all_to_all, 0 for barrier.
    bytes: int
    dtype: str  # dtype of the elements
    strategy: str
    replicas: int
    calls: int  # number of consecutive calls per repeat
    seconds: tuple[float, ...]  # for each repeat, mean seconds per call on the slowest process
    algorithm: str = ""  # all-reduce algorithm, if several are compared; empty for the engine's operation

    @property
    def label(self) -> str:
        """Name of the measurement in tables and figures: the algorithm, if any, or else the operation."""
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


# Colors of operations or algorithms (ColorBrewer's "Dark2"), the same in all plots.
_PALETTE = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#666666")
_TICKS = {
    4**i: text for i, text in zip(range(1, 16, 2), ("4", "64", "1K", "16K", "256K", "4M", "64M", "1G"), strict=True)
}


def draw(measurements: Sequence[Measurement]) -> "Figure":
    """Returns the figure of at least one measurement, all with the same strategy and dtype."""
    figure = new_figure(11, 4.6)
    time_axes, bandwidth_axes = figure.subplots(1, 2)
    first_measurement = measurements[0]
    figure.suptitle(
        f"{first_measurement.strategy}, {first_measurement.replicas} replicas, {first_measurement.dtype}",
        x=0.01,
        ha="left",
        fontsize="medium",
    )
    labels = ALGORITHMS if first_measurement.algorithm else TRAFFIC
    for name, color in zip(labels, _PALETTE, strict=False):
        points = [m for m in measurements if m.label == name]
        if name == "barrier":
            for point in points:
                time_axes.axhline(point.median * 1e3, color=color, linewidth=1.2, linestyle="--", label=name)
        elif points:
            points = sorted(points, key=lambda m: m.bytes)
            sizes = [m.bytes for m in points]
            style = {"color": color, "linewidth": 1.6, "marker": "o", "markersize": 4, "label": name}
            time_axes.plot(sizes, [m.median * 1e3 for m in points], **style)
            time_axes.fill_between(
                sizes,
                [min(m.seconds) * 1e3 for m in points],
                [max(m.seconds) * 1e3 for m in points],
                color=color,
                alpha=0.15,
                linewidth=0,
            )
            bandwidth_axes.plot(sizes, [m.bus_bandwidth / 1e9 for m in points], **style)
    time_axes.set_yscale("log")
    title = "Time of an all-reduce" if first_measurement.algorithm else "Time of a call"
    _format_axes(time_axes, title, "milliseconds: median and range of the repeats", measurements)
    _format_axes(bandwidth_axes, "Bus bandwidth", "GB/s (median)", measurements)
    bandwidth_axes.set_ylim(bottom=0)
    time_axes.legend(frameon=False)
    return figure


def _format_axes(axes: "Axes", title: str, unit: str, measurements: Sequence[Measurement]) -> None:
    describe_axes(axes, title, "bytes", unit)
    sizes = [m.bytes for m in measurements if m.bytes] or [4]
    axes.set_xscale("log", base=2)
    ticks = {size: text for size, text in _TICKS.items() if min(sizes) <= size <= max(sizes)}
    if len(ticks) > 1:
        axes.set_xticks(list(ticks), labels=list(ticks.values()))
    axes.minorticks_off()


_ROW = "{:16}{:>11}{:>12}{:>12}{:>16}{:>12}"


def header(first_title: str = "operation") -> str:
    """Returns the header line; `first_title` is the title of the first column."""
    return _ROW.format(first_title, "size", "median ms", "min ms", "algorithm GB/s", "bus GB/s")


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
