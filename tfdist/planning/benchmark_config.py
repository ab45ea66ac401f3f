"""The configuration of a benchmark. Does not use TensorFlow."""

import dataclasses
from typing import Any

from tfdist.config.all_reduce import ALGORITHMS
from tfdist.config.conflicts import check_strategy, flag_text
from tfdist.config.fields import OUTPUT, check_fields, flag_field
from tfdist.config.search import UNITS_HELP, parse_byte_size
from tfdist.config.strategy_registry import strategies_with, strategy_declaration
from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError
from tfdist.errors.formatting import nearest
from tfdist.planning.benchmark_results import TRAFFIC

MEASURED = "What is measured"
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
ALL = "all"
GROWTH = 4  # factor between two sizes of a range
_SIZE_LABEL = "each size"
_SIZES = "Write bytes, as in 4,64KB,1MB, or a range 4B:64MB"
_TRAIN_FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}


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


def parse_operations(text: str) -> tuple[str, ...]:
    """Parses comma-separated names of operations; an empty text means all.

    Raises:
      InputError: a name is unknown.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip()) or tuple(TRAFFIC)
    for name in names:
        if name not in TRAFFIC:
            raise InputError(f"{name} is not a known operation.{nearest(name, TRAFFIC)}")
    return names


def parse_algorithms(text: str) -> tuple[str, ...]:
    """Parses comma-separated all-reduce algorithms; an empty text means none. `all` replaces all others.

    Raises:
      InputError: a name is unknown.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in (*ALGORITHMS, ALL):
            raise InputError(f"{name} is not an all-reduce algorithm.{nearest(name, (*ALGORITHMS, ALL))}")
    return (ALL,) if ALL in names else tuple(dict.fromkeys(names))


def _train_field(name: str) -> Any:
    return dataclasses.field(default=_TRAIN_FIELDS[name].default, metadata=_TRAIN_FIELDS[name].metadata)


def too_few_replicas(received: str) -> InputError:
    """Returns the error for a strategy without communicating replicas."""
    return InputError(
        "A benchmark of collectives needs a strategy with collectives and at least two replicas. Received: "
        f"{received}. Use --strategy=mirrored --devices=2, `tfdist launch` or horovodrun."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Configuration of a benchmark; `tfdist bench --help` lists its fields.

    Raises:
      InputError: a field is out of range, or two fields exclude each other.
    """

    operations: str = flag_field(
        "",
        MEASURED,
        f"Comma-separated operations to measure: {', '.join(TRAFFIC)}. Defaults to all.",
        check=lambda text: text and ",".join(parse_operations(text)),
    )
    all_reduce: str = flag_field(
        "",
        MEASURED,
        f"Comma-separated all-reduce algorithms to compare, instead of operations: {', '.join(ALGORITHMS)}; all means those "
        "that exist on the job's hosts.",
        check=lambda text: ",".join(parse_algorithms(text)),
    )
    sizes: str = flag_field(
        "4B:64MB",
        MEASURED,
        f"{_SIZES}, each {GROWTH} times the one before. {UNITS_HELP}.",
        check=lambda text: text if parse_sizes(text) else "",
    )
    dtype: str = flag_field("float32", MEASURED, f"Data type of the elements: {', '.join(DTYPES)}.", choices=DTYPES)
    repeats: int = flag_field(5, MEASURED, "Number of measurements of each size.", minimum=1, maximum=10**9)
    repeat_seconds: float = flag_field(0.05, MEASURED, "Approximate seconds of each measurement.", maximum=10**9)
    strategy: str = _train_field("strategy")
    devices: int = _train_field("devices")
    tpu: str = _train_field("tpu")
    communication: str = _train_field("communication")
    topology: str = _train_field("topology")
    coordinator: str = _train_field("coordinator")
    token_file: str = _train_field("token_file")
    insecure: bool = _train_field("insecure")
    start_timeout_seconds: float = _train_field("start_timeout_seconds")
    intra_op_threads: int = _train_field("intra_op_threads")
    output_dir: str = flag_field(
        "", OUTPUT, "New or empty directory. Defaults to runs/bench-collectives-STRATEGY-TIME.", per_process=True
    )

    def __post_init__(self) -> None:
        """Validates the fields, and their combination by the rules of `TrainConfig`."""
        check_fields(self)
        if self.all_reduce and self.operations not in ("", "all_reduce"):
            raise InputError(
                "Only all_reduce has algorithms: leave out --operations or --all_reduce. Received: "
                f"{flag_text('operations', self.operations)} {flag_text('all_reduce', self.all_reduce)}."
            )
        if self.strategy in strategies_with("mesh_shape"):
            raise too_few_replicas(flag_text("strategy", self.strategy))
        names = {field.name for field in dataclasses.fields(self)} & _TRAIN_FIELDS.keys() - {"all_reduce"}
        TrainConfig(**{name: getattr(self, name) for name in names})
        check_strategy(self, strategy_declaration(self.strategy))
