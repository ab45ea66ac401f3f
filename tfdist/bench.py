"""Benchmark collectives: time and bandwidth of each operation between replicas, by message size.

Works in one process (`--strategy=mirrored --devices=2`), under `tfdist launch` and under horovodrun.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.cli import command, early_checks, flags
from tfdist.cli.output import TEXT, Output
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.all_reduce import AUTO
from tfdist.errors import InputError, nearest
from tfdist.planning.benchmark_config import ALL, BenchConfig, too_few_replicas
from tfdist.planning.benchmark_results import TRAFFIC

if TYPE_CHECKING:
    from tfdist.distribution.strategy import Strategy
    from tfdist.planning.benchmark_results import Measurement

BENCHMARKS = ("collectives",)
_EXAMPLES = (
    "tfdist bench collectives --strategy=mirrored --devices=2 --sizes=64KB,1MB",
    "tfdist launch --processes=2 -- tfdist bench collectives --operations=all_reduce --sizes=4B:1MB",
)


def main(config: BenchConfig, output: Output = TEXT) -> int:
    """Measures the collectives; returns the exit code."""
    context = early_checks.check_cluster(config, early_checks.detect_context(config))
    load_tensorflow()  # imported late, after parsing flags
    from tfdist.cli import open_strategy
    from tfdist.planning import benchmark_results
    from tfdist.reporting import RunDirectory
    from tfdist.reporting.file_errors import GrowingFile
    from tfdist.storage import storage_of

    # "auto" provides all algorithms.
    options = {"all_reduce": AUTO} if config.all_reduce else {}
    with open_strategy.running_strategy(config, context, more_options=options) as (config, detection, strategy):
        _check_strategy(strategy, config)
        measurements = _measurements(config, strategy)
        hosts = open_strategy.hosts(strategy)
        if not strategy.is_chief:
            for _ in measurements:
                pass
            return 0
        path = config.output_dir or f"runs/bench-collectives-{strategy.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        run = RunDirectory.check(path)
        run.begin(flags.flags_text(config), hosts, communication=strategy.communication)
        directory = run.path
        output.line(f"{detection.reason}\n{benchmark_results.header(*['all_reduce'][: bool(config.all_reduce)])}")
        results = []
        with contextlib.closing(GrowingFile(directory / "collectives.jsonl")) as file:
            for measurement in measurements:
                results.append(measurement)
                output.line(benchmark_results.row(measurement))
                file.write(json.dumps(measurement.record()).encode() + b"\n")
        with storage_of(directory).staged(directory / "collectives.png") as picture:
            benchmark_results.draw(results).savefig(picture, format="png")
        output.line(path)
        output.result(
            {
                "benchmark": "collectives",
                "strategy": strategy.name,
                "reason": detection.reason,
                "processes": strategy.cluster.size,
                "replicas": strategy.replicas,
                "measurements": [
                    {name: value for name, value in measurement.record().items() if name != "schema"}
                    for measurement in results
                ],
                "output_dir": str(path),
            }
        )
    return 0


def _check_strategy(strategy: "Strategy", config: BenchConfig) -> None:
    import tensorflow as tf

    from tfdist.planning.benchmark_timing import check_dtype

    if strategy.replicas < 2:
        raise too_few_replicas(f"--strategy={config.strategy}, {strategy.replicas} replicas")
    names = ("all_reduce",) if config.all_reduce else config.parsed.operations or [*TRAFFIC]
    check_dtype(strategy.collectives, names, tf.as_dtype(config.dtype))


def _measurements(config: BenchConfig, strategy: "Strategy") -> "Iterator[Measurement]":
    """Yields measurements of all operations and sizes; a barrier has no size and is measured once."""
    import tensorflow as tf

    from tfdist.collectives.all_reduce_algorithms import check_algorithm, possible_algorithms
    from tfdist.planning.benchmark_timing import measure

    timing: dict[str, Any] = {"repeats": config.repeats, "repeat_seconds": config.repeat_seconds}
    dtype = tf.as_dtype(config.dtype)
    if config.all_reduce and strategy.tuned_collectives:
        topology, algorithms = strategy.tuned_collectives.topology, config.parsed.all_reduce
        algorithms = possible_algorithms(topology) if ALL in algorithms else algorithms
        for algorithm in algorithms:
            check_algorithm(algorithm, topology)
        for size in config.parsed.sizes:
            for algorithm in algorithms:
                yield measure(strategy, "all_reduce", size, dtype, algorithm=algorithm, **timing)
        return
    for name in config.parsed.operations or TRAFFIC:
        for size in config.parsed.sizes if name != "barrier" else (0,):
            yield measure(strategy, name, size, dtype, **timing)


def start(argv: Sequence[str]) -> int:
    """Runs the command; `argv` has the program name, the name of the benchmark, and flags."""
    has_name = len(argv) > 1 and not argv[1].startswith("-")
    name, remaining_arguments = (argv[1], argv[2:]) if has_name else ("", argv[1:])

    def call(config: BenchConfig, output: Output) -> int:
        if name not in BENCHMARKS:
            raise InputError(
                "The benchmark's name comes first, as in `tfdist bench collectives`. Received: "
                f"{name or 'none'}.{nearest(name, BENCHMARKS)}"
            )
        return main(config, output)

    return command.run(
        f"bench {name if name in BENCHMARKS else BENCHMARKS[0]}",
        BenchConfig,
        call,
        [argv[0], *remaining_arguments],
        about=__doc__ or "",
        has_json=True,
        examples=_EXAMPLES,
    )


if __name__ == "__main__":
    sys.exit(start(sys.argv))
