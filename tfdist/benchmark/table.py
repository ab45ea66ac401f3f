"""Formats measurements as lines of a table."""

from tfdist.benchmark.measurement import Measured
from tfdist.errors.byte_sizes import byte_size
from tfdist.reporting.plain_reporter import rounded

_COLUMNS = (
    ("operation", 16),
    ("size", 11),
    ("median ms", 12),
    ("min ms", 12),
    ("algorithm GB/s", 16),
    ("bus GB/s", 12),
)


def header(first: str = _COLUMNS[0][0]) -> str:
    """Returns the header line; `first` is the title of the first column."""
    return _aligned(first, *(title for title, _ in _COLUMNS[1:]))


def row(measured: Measured) -> str:
    """Returns the line of one measurement; a barrier has no size and no bandwidth."""
    bandwidths = [measured.algorithm_bandwidth, measured.bus_bandwidth]
    return _aligned(
        measured.label,
        byte_size(measured.bytes) if measured.bytes else "-",
        rounded(measured.median * 1e3),
        rounded(measured.least * 1e3),
        *(rounded(bandwidth / 1e9) if measured.bytes else "-" for bandwidth in bandwidths),
    )


def _aligned(first: str, *others: str) -> str:
    cells = [other.rjust(width) for other, (_, width) in zip(others, _COLUMNS[1:], strict=True)]
    return first.ljust(_COLUMNS[0][1]) + "".join(cells)
