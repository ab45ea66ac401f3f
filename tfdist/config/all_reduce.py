"""Parses `--all_reduce`, the all-reduce algorithm, and CSV files that map message sizes to algorithms."""

import dataclasses
import re
from collections.abc import Iterable
from typing import NamedTuple, Self

from tfdist.config.spec import call, parse
from tfdist.errors import InputError, nearest

ENGINE = "engine"
AUTO = "auto"
TFDIST_ALGORITHMS = ("ring", "tree", "halving_doubling", "hierarchical")
ALGORITHMS = (ENGINE, *TFDIST_ALGORITHMS)
MAX_MESSAGE_BYTES = 2**63 - 1
# A file name without quotes, which is not a Python literal.
_BARE_TABLE = re.compile(rf"\s*{AUTO}\s*\(\s*table\s*=\s*([^'\",()]*?)\s*\)\s*")
_COLLECTIVE = "allreduce"  # the name in NCCL's tuner plugins
_COLUMNS = "collective,min_bytes,max_bytes,algorithm"


class Band(NamedTuple):
    """The algorithm for a range of message sizes."""

    min_bytes: int  # size of the smallest message
    max_bytes: int  # size of the largest message
    algorithm: str  # one of `ALGORITHMS`


@dataclasses.dataclass(frozen=True)
class AlgorithmTable:
    """All-reduce algorithms by message size; the engine reduces messages of all other sizes.

    Raises:
      InputError: the bands overlap, are not in order, or name an unknown algorithm.
    """

    bands: tuple[Band, ...] = ()  # disjoint ranges of sizes, in ascending order

    def __post_init__(self) -> None:
        end = -1
        for band in self.bands:
            if band.algorithm not in ALGORITHMS:
                raise InputError(
                    f"{band.algorithm} is not an all-reduce algorithm.{nearest(band.algorithm, ALGORITHMS)}"
                )
            if not end < band.min_bytes <= band.max_bytes:
                raise InputError(
                    "Ranges of sizes must ascend and must not overlap. Received: "
                    f"{band.min_bytes} to {band.max_bytes}{f' after {end}' if end >= 0 else ''}. Sort the lines."
                )
            end = band.max_bytes

    @classmethod
    def uniform(cls, algorithm: str) -> Self:
        """Returns a table with one algorithm for messages of all sizes."""
        return cls((Band(0, MAX_MESSAGE_BYTES, algorithm),))

    def algorithm_for(self, size: int) -> str:
        """Returns the algorithm for a message of `size` bytes."""
        return next((band.algorithm for band in self.bands if band.min_bytes <= size <= band.max_bytes), ENGINE)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The distinct algorithms of the bands, in the order of `ALGORITHMS`."""
        names = {band.algorithm for band in self.bands}
        return tuple(name for name in ALGORITHMS if name in names)

    def to_csv(self, notes: Iterable[str] = ()) -> str:
        """Returns the table as CSV, as read by `parse_table`, with `notes` as comments."""
        rows = [f"{_COLLECTIVE},{band.min_bytes},{band.max_bytes},{band.algorithm}" for band in self.bands]
        return "\n".join([*(f"# {note}" for note in notes), _COLUMNS, *rows, ""])


def parse_table(text: str, source: str) -> AlgorithmTable:
    """Parses a table of algorithms, a CSV file. Errors name it, by `source`, and the invalid line.

    The first columns are the same as for NCCL's tuner plugins: collective, min_bytes, max_bytes, algorithm. Further columns,
    comments (#), and collectives other than allreduce are skipped.
    """
    bands: list[Band] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#") or not line.strip() or line.strip().startswith(_COLUMNS):
            continue
        collective, *values = [cell.strip() for cell in line.split(",")]
        if len(values) < 3 or not all(value.isascii() and value.isdigit() for value in values[:2]):
            raise InputError(
                f"{source}, line {number}: must be {_COLUMNS}, with sizes in bytes. Received: {line.strip()[:80]}. Write, for "
                f"example, {_COLLECTIVE},0,65536,tree."
            )
        if collective == _COLLECTIVE:
            try:
                bands = [*AlgorithmTable((*bands, Band(int(values[0]), int(values[1]), values[2]))).bands]
            except InputError as error:
                raise InputError(f"{source}, line {number}: {error}") from error
    if not bands:
        raise InputError(f"{source} needs at least one line {_COLLECTIVE},MIN,MAX,ALGORITHM. Received no such line.")
    return AlgorithmTable(tuple(bands))


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """The choice of an all-reduce algorithm."""

    name: str = ENGINE  # one of `ALGORITHMS`, or `AUTO`
    table: str = ""  # file with a table of algorithms, for `AUTO`; empty to measure the algorithms

    @property
    def is_measured(self) -> bool:
        """Whether algorithms are selected by measuring the job's network."""
        return self.name == AUTO and not self.table


def parse_all_reduce(text: str) -> AllReduce:
    """Parses `engine`, the name of an algorithm, `auto` or `auto(table=FILE)`; raises `InputError`."""
    match = _BARE_TABLE.fullmatch(text)
    spec = parse(f"{AUTO}(table={match[1]!r})" if match else text)
    if spec.name not in (*ALGORITHMS, AUTO):
        raise InputError(f"{spec.name} is not an all-reduce algorithm.{nearest(spec.name, (*ALGORITHMS, AUTO))}")
    table = call((lambda table=None: table) if spec.name == AUTO else lambda: None, spec)
    if "table" in spec.args and (not isinstance(table, str) or not table):
        raise InputError(f"table must be the name of a file. Received: {table!r}. Write auto(table='all_reduce.csv').")
    return AllReduce(spec.name, table or "")
