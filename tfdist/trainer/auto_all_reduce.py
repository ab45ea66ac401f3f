"""Implements `--all_reduce=auto`: for each message size, chooses the algorithm that is fastest on the job's own links.

Before the first step, the engine's all-reduce and every algorithm are timed at several sizes. The calls alternate, so that
changes in load affect all algorithms, and each call starts on all processes at the same time. Rank 0 decides for all processes.
The table is saved with the state of the run.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdist.collectives.all_reduce_algorithms import TunedCollectives, possible_algorithms
from tfdist.collectives.interface import tensor_bytes
from tfdist.config.all_reduce import ALGORITHMS, ENGINE, MAX_MESSAGE_BYTES, AlgorithmTable, Band
from tfdist.coordination.group import LONG_SECONDS
from tfdist.distribution.strategy import Strategy
from tfdist.errors import byte_size
from tfdist.trainer.inspections import Inspection, RunView, medians_of_slowest, time_interleaved

MAX_TIME_RATIO = 0.95  # an algorithm must take less than this fraction of the engine's time to replace it
SMALLEST_BYTES, GROWTH = 1024, 4  # of the measured sizes, each of which is `GROWTH` times the previous one
MAX_MEASURED_BYTES = 64 * 1024 * 1024
_ROUNDS, _MAX_ROUNDS = 3, 21  # rounds between checks of the elapsed time, and in total
_MAX_SECONDS = 10.0  # elapsed time after which no more rounds are run for a size

Times = Mapping[int, Mapping[str, float]]  # seconds, by size and algorithm
_log = logging.getLogger(__name__)


class AutoAllReduce(Inspection):
    """Measures the algorithms and creates their table before the first step, unless there is a table."""

    def __init__(self, run_view: RunView, record: Callable[[str], None]):
        """Initializes the inspection; `record` is called with the table as CSV on the chief."""
        self._steps, self._record = run_view.steps, record

    def next_step(self, step: int) -> int | None:
        return step if self._steps.needs_all_reduce_table else None

    def inspect(self, step: int) -> dict[str, float]:
        strategy, specs = self._steps.strategy, self._steps.specs
        sizes = list(map(tensor_bytes, specs))
        bucket_bytes = min(self._steps.compression.bucket_bytes, sum(sizes))
        times = measure(strategy, sizes_up_to(max(bucket_bytes, *sizes)))
        bands = [list(band) for band in fastest_algorithms(times).bands]
        bands = strategy.peers.broadcast("all_reduce", bands, LONG_SECONDS)
        table = AlgorithmTable(tuple(Band(*band) for band in bands))
        self._steps.use_all_reduce_table(table)
        if strategy.is_chief:
            for line in explain(table, times):
                _log.info("--all_reduce=auto: %s", line)
            self._record(table.to_csv(notes(times)))
        return {}


def sizes_up_to(largest: int) -> list[int]:
    """Returns the sizes to measure: 1 KiB times powers of 4, up to the first one that is at least `largest`."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] < min(largest, MAX_MEASURED_BYTES):
        sizes.append(sizes[-1] * GROWTH)
    return sizes


def measure(strategy: Strategy, sizes: Sequence[int]) -> dict[int, dict[str, float]]:
    """Times the engine's all-reduce and all algorithms; every process must call this function.

    The strategy must have `tuned_collectives`. Sizes are in bytes. Returns the median seconds on the slowest process, by
    size and algorithm; the results are the same on all processes.
    """
    return {size: _measure_size(strategy, size) for size in sizes}


def _measure_size(strategy: Strategy, size: int) -> dict[str, float]:
    collectives = strategy.tuned_collectives
    assert collectives
    names = possible_algorithms(collectives.topology)
    calls = {name: compiled_call(strategy, collectives, name, size) for name in names}
    barrier = compiled_call(strategy, collectives, ENGINE, SMALLEST_BYTES // 4)
    for call in [barrier, *calls.values()] * 2:
        call()  # the first call compiles; in the second call, some engines cache their negotiation
    times: dict[str, list[float]] = {name: [] for name in calls}
    start_time, is_over = time.perf_counter(), False
    while not is_over:
        for name, seconds in time_interleaved(calls, barrier, _ROUNDS).items():
            times[name] += seconds
        is_over = len(times[ENGINE]) >= _MAX_ROUNDS or time.perf_counter() - start_time > _MAX_SECONDS
        is_over = strategy.peers.broadcast(f"all_reduce/{size}", is_over, LONG_SECONDS)
    return medians_of_slowest(strategy.peers.gather(f"all_reduce/{size}/times", times, LONG_SECONDS))


def compiled_call(strategy: Strategy, collectives: TunedCollectives, name: str, size: int) -> Callable[[], object]:
    """Returns a compiled call of one all-reduce of `size` bytes."""
    collectives = collectives.with_table(AlgorithmTable.uniform(name))

    def replica_function(value: tf.Tensor) -> tf.Tensor:
        [total] = collectives.all_reduce([tf.fill([size // 4], value)], name=f"all_reduce/{name}/{size}")
        return total[0]

    scalar = tf.constant(1.0)
    # A concrete function, because TensorFlow warns about many functions with the same code.
    function = tf.function(lambda value: strategy.run(replica_function, value), autograph=False)
    concrete_function = function.get_concrete_function(scalar)
    return lambda: [float(value) for value in strategy.local(concrete_function(scalar))]


def fastest_algorithms(times: Times) -> AlgorithmTable:
    """Returns the table of the fastest algorithms; keeps the engine's unless another is faster by more than noise.

    The limit between two measured sizes is their geometric mean.
    """
    bands: list[Band] = []
    sizes = sorted(times)
    for size, next_size in zip(sizes, [*sizes[1:], None], strict=True):
        seconds = times[size]
        best = min(seconds, key=seconds.__getitem__)
        algorithm = best if seconds[best] < MAX_TIME_RATIO * seconds[ENGINE] else ENGINE
        end = int((size * next_size) ** 0.5) if next_size else MAX_MESSAGE_BYTES
        if bands and bands[-1].algorithm == algorithm:
            bands[-1] = bands[-1]._replace(max_bytes=end)
        else:
            bands.append(Band(bands[-1].max_bytes + 1 if bands else 0, end, algorithm))
    return AlgorithmTable(tuple(bands))


def notes(times: Times) -> list[str]:
    """Returns a line with the measurements of each size."""
    return [
        f"{byte_size(size)}: "
        + ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in ALGORITHMS if name in seconds)
        for size, seconds in times.items()
    ]


def explain(table: AlgorithmTable, times: Times) -> list[str]:
    """Returns a line for each band of a table, with its algorithm and measurements."""
    lines = []
    for band in table.bands:
        sizes = [size for size in times if band.min_bytes <= size <= band.max_bytes]
        text = f"sums up to {byte_size(band.max_bytes)}" if band.max_bytes < MAX_MESSAGE_BYTES else "larger sums"
        text = "all sums" if len(table.bands) == 1 else text
        measured = notes({size: times[size] for size in (sizes[0], sizes[-1])})
        lines.append(f"{text} use {band.algorithm}. Measured: {'; '.join(measured)}.")
    return lines
