"""The configuration of a benchmark. Does not use TensorFlow."""

import dataclasses

from tfdist.config.all_reduce import ALGORITHMS
from tfdist.config.conflicts import check_combinations, conflict_error, flag_text
from tfdist.config.fields import check_fields, flag_field, output_flag, parse_known_names
from tfdist.config.search import UNITS_HELP, parse_byte_size
from tfdist.config.strategy_registry import JobOptions, TrainerOptions, strategies_with
from tfdist.errors import InputError
from tfdist.planning.benchmark_results import TRAFFIC

MEASURED = "What is measured"
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
ALL = "all"
GROWTH = 4  # factor between two sizes of a range
_SIZE_LABEL = "each size"
_SIZES = "Write bytes, as in 4,64KB,1MB, or a range 4B:64MB"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses `4B:64MB` (4 bytes to 64 MiB, by factors of 4) or a list such as `4,64KB,1MB`.

    Returns:
      The sizes in bytes.

    Raises:
      InputError: `text` is neither.
    """
    first, colon, last = text.partition(":")
    if not colon:
        return tuple(parse_byte_size(part, _SIZE_LABEL) for part in text.split(","))
    size, end = parse_byte_size(first, _SIZE_LABEL), parse_byte_size(last, _SIZE_LABEL)
    if size > end:
        raise InputError(f"{text} must be a range from a smaller to a larger size. {_SIZES}.")
    sizes = []
    while size <= end:
        sizes.append(size)
        size *= GROWTH
    return tuple(sizes)


def too_few_replicas(received: str) -> InputError:
    """Returns the error for a strategy without communicating replicas."""
    return InputError(
        "A benchmark of collectives needs a strategy with collectives and at least two replicas. Received: "
        f"{received}. Use --strategy=mirrored --devices=2, `tfdist launch` or horovodrun."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig(JobOptions):
    """Configuration of a benchmark; `tfdist bench --help` lists its fields.

    Raises:
      InputError: a field is out of range, or two fields exclude each other.
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
        f"Comma-separated all-reduce algorithms to compare, instead of operations: {', '.join(ALGORITHMS)}; all means those "
        "that exist on the job's hosts.",
        parse=lambda text: parse_known_names(text, (*ALGORITHMS, ALL), "an all-reduce algorithm"),
    )
    sizes: str = flag_field(
        "4B:64MB",
        MEASURED,
        f"{_SIZES}, each {GROWTH} times the one before. {UNITS_HELP}.",
        check=str,
        parse=parse_sizes,
    )
    dtype: str = flag_field("float32", MEASURED, f"Data type of the elements: {', '.join(DTYPES)}.", choices=DTYPES)
    repeats: int = flag_field(5, MEASURED, "Number of measurements of each size.", minimum=1, maximum=10**9)
    repeat_seconds: float = flag_field(0.05, MEASURED, "Approximate seconds of each measurement.", maximum=10**9)
    tpu: str = dataclasses.field(default="", metadata=TrainerOptions.__dataclass_fields__["tpu"].metadata)
    output_dir: str = output_flag(
        "", "New or empty directory. Defaults to runs/bench-collectives-STRATEGY-TIME.", per_process=True
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.all_reduce and self.operations not in ("", "all_reduce"):
            rule = "Only all_reduce has algorithms: leave out --operations or --all_reduce."
            raise conflict_error(rule, self, ("operations", "all_reduce"))
        if self.strategy in strategies_with("mesh_shape"):
            raise too_few_replicas(flag_text("strategy", self.strategy))
        check_combinations(self)
