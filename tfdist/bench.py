"""Benchmark collectives: time and bandwidth of each operation between replicas, by message size.

Works in one process (`--strategy=mirrored --devices=2`), under `tfdist launch` and under horovodrun.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.cli import command, early_checks, flags
from tfdist.cli.output import TEXT, Output
from tfdist.cluster.quiet_tensorflow import load_tensorflow
from tfdist.config.all_reduce import ALGORITHMS, AUTO
from tfdist.config.conflicts import check_combinations, conflict_error, flag_text
from tfdist.config.fields import check_fields, flag_field, output_flag, parse_known_names
from tfdist.config.search import UNITS_HELP, parse_byte_size
from tfdist.config.strategy_registry import JobOptions, TrainerOptions, strategies_with
from tfdist.errors import InputError, nearest
from tfdist.planning.benchmark_results import TRAFFIC

if TYPE_CHECKING:
    from tfdist.distribution.strategy import Strategy
    from tfdist.planning.benchmark_results import Measurement

BENCHMARKS = ("collectives",)
_EXAMPLES = (
    "tfdist bench collectives --strategy=mirrored --devices=2 --sizes=64KB,1MB",
    "tfdist launch --processes=2 -- tfdist bench collectives --operations=all_reduce --sizes=4B:1MB",
)
MEASURED = "What is measured"
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
ALL = "all"
GROWTH = 4  # factor between two sizes of a range
_SIZE_LABEL = "each size"
_SIZES = "a list such as 4,64KB,1MB, or a range such as 4B:64MB"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Returns the sizes in bytes of a range, such as `4B:64MB` (by factors of 4), or of a list, such as `4,64KB`."""
    first, colon, last = text.partition(":")
    if not colon:
        return tuple(parse_byte_size(part, _SIZE_LABEL) for part in text.split(","))
    size, end = parse_byte_size(first, _SIZE_LABEL), parse_byte_size(last, _SIZE_LABEL)
    if size > end:
        raise InputError(f"A range must be from a smaller to a larger size. Received: {text}. Pass {_SIZES}.")
    sizes = []
    while size <= end:
        sizes.append(size)
        size *= GROWTH
    return tuple(sizes)


def too_few_replicas_error(received: str) -> InputError:
    """Returns the error for a strategy without communicating replicas."""
    return InputError(
        "A benchmark of collectives needs a strategy with collectives and at least two replicas. Received: "
        f"{received}. Use --strategy=mirrored --devices=2, `tfdist launch` or horovodrun."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig(JobOptions):
    """Configuration of a benchmark; `tfdist bench --help` lists its fields.

    Raises:
      InputError: a field is out of range, or two fields are mutually exclusive.
    """

    operations: str = flag_field(
        "",
        MEASURED,
        f"Comma-separated operations to measure: {', '.join(TRAFFIC)}. Defaults to all.",
        parse=lambda text: parse_known_names(text, TRAFFIC, "a known operation"),
    )
    all_reduce: str = flag_field(
        "",
        MEASURED,
        f"Comma-separated all-reduce algorithms to compare, instead of operations: {', '.join(ALGORITHMS)}. `all` means "
        "every algorithm that is possible on the job's hosts.",
        parse=lambda text: parse_known_names(text, (*ALGORITHMS, ALL), "an all-reduce algorithm"),
    )
    sizes: str = flag_field(
        "4B:64MB",
        MEASURED,
        f"Sizes in bytes: {_SIZES}, in which each size is {GROWTH} times the previous one. {UNITS_HELP}.",
        check=str,
        parse=parse_sizes,
    )
    dtype: str = flag_field("float32", MEASURED, f"Data type of the elements: {', '.join(DTYPES)}.", choices=DTYPES)
    repeats: int = flag_field(5, MEASURED, "Number of measurements for each size.", minimum=1, maximum=10**9)
    repeat_seconds: float = flag_field(0.05, MEASURED, "Approximate seconds per measurement.", maximum=10**9)
    tpu: str = dataclasses.field(default="", metadata=TrainerOptions.__dataclass_fields__["tpu"].metadata)
    output_dir: str = output_flag(
        "", "New or empty directory. Defaults to runs/bench-collectives-STRATEGY-TIME.", per_process=True
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.all_reduce and self.operations not in ("", "all_reduce"):
            rule = "Only all_reduce has algorithms: remove --operations or --all_reduce."
            raise conflict_error(rule, self, ("operations", "all_reduce"))
        if self.strategy in strategies_with("mesh_shape"):
            raise too_few_replicas_error(flag_text("strategy", self.strategy))
        check_combinations(self)


def main(config: BenchConfig, output: Output = TEXT) -> int:
    """Measures the collectives; returns the exit code."""
    context = early_checks.check_cluster(config, early_checks.detect_context(config))
    load_tensorflow()  # imported late, after parsing flags
    from tfdist.cli import open_strategy
    from tfdist.planning import benchmark_results
    from tfdist.reporting import RunDirectory, run_summary
    from tfdist.reporting.file_errors import AppendOnlyFile
    from tfdist.storage import storage_of

    # "auto" provides all algorithms.
    options = {"all_reduce": AUTO} if config.all_reduce else {}
    with open_strategy.running_strategy(config, context, more_options=options) as (config, strategy_choice, strategy):
        _check_strategy(strategy, config)
        measurements = _measurements(config, strategy)
        host_names = open_strategy.host_names(strategy)
        if not strategy.is_chief:
            for _ in measurements:
                pass
            return 0
        path = config.output_dir or f"runs/bench-collectives-{strategy.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        run = RunDirectory.check(path)
        run.begin(flags.flags_text(config), host_names, communication=strategy.communication)
        directory = run.path
        output.line(f"{strategy_choice.reason}\n{benchmark_results.header(*['all_reduce'][: bool(config.all_reduce)])}")
        results = []
        with contextlib.closing(AppendOnlyFile(directory / "collectives.jsonl")) as file:
            for measurement in measurements:
                results.append(measurement)
                output.line(benchmark_results.row(measurement))
                file.write(json.dumps(measurement.record()).encode() + b"\n")
        storage_of(directory).replace(directory / "collectives.png", run_summary.png(benchmark_results.draw(results)))
        output.line(path)
        output.result(
            {
                "benchmark": "collectives",
                "strategy": strategy.name,
                "reason": strategy_choice.reason,
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
        raise too_few_replicas_error(f"--strategy={config.strategy}, {strategy.replicas} replicas")
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
                "The benchmark's name comes first, as in `tfdist bench collectives`. Received"
                f"{f': {name}' if name else ' no name'}.{nearest(name, BENCHMARKS)}"
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
