"""Parses `--find` and byte sizes."""

import dataclasses
import re
from typing import Any, ClassVar

from tfdist.config.parameters import Parameters, integer, number, parse_kind
from tfdist.errors import InputError

UNITS_HELP = "KB and KiB are 1024 bytes"
_BYTE_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT])i?B?|B)?\s*", re.IGNORECASE)


def parse_byte_size(size: int | str, name: str) -> int:
    """Returns a size in bytes, at least 1, from a number or a string such as "2GiB", "1.5 GiB" or "500MB".

    Units are powers of 1024: `64KB`, `64KiB`, `64K` and `64kb` are equal. `name` is used only in error messages.
    """
    match = _BYTE_SIZE.fullmatch(str(size))
    power = " KMGT".index((match[2] or " ").upper()) if match else 0
    count = int(float(match[1]) * 1024**power) if match else 0
    if isinstance(size, bool) or count < 1:
        raise InputError(
            f"{name} must be a number of bytes above 0, such as 512, 64KB or 2GiB; {UNITS_HELP}. Received: {size!r}."
        )
    return count


@dataclasses.dataclass(frozen=True)
class LearningRateSearch(Parameters):
    """A search for the learning rate.

    Raises:
      InputError: a value is out of range.
    """

    name: ClassVar[str] = "learning_rate"
    min: float = number(1e-7, "(0, inf)")  # learning rate of the first step, greater than 0
    max: float = number(10.0, "(0, inf)")  # learning rate of the last step, greater than `min`
    steps: int = integer(100, 10, "steps")  # number of steps, at least 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min >= self.max:
            raise self.invalid("min must be less than max", f"min={self.min:g}, max={self.max:g}")


@dataclasses.dataclass(frozen=True)
class BatchSizeSearch(Parameters):
    """A search for the batch size.

    Raises:
      InputError: a value is out of range.
    """

    name: ClassVar[str] = "batch_size"
    # Memory limit for all processes of a trial together, in bytes or as in "2GiB"; "" for all available memory.
    memory: int | str = ""
    max: int = integer(0, 0, "examples")  # largest global batch size to try; 0 for the number of training examples
    # Minimum number of steps of a trial, at least 4. Only the second half is timed. Trials of less than a second
    # run more steps.
    steps: int = integer(20, 4, "steps")
    processes: int = integer(1, 1, "processes")  # number of processes of a trial, on this host
    launcher: str = "tensorflow"  # launcher of these processes; see `Job`, which validates it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory != "":
            object.__setattr__(self, "memory", parse_byte_size(self.memory, "memory"))

    @property
    def memory_bytes(self) -> int | None:
        """The memory in bytes; None for all available memory."""
        return self.memory if isinstance(self.memory, int) else None


Search = LearningRateSearch | BatchSizeSearch


def parse_search(text: str) -> Search:
    """Parses `name` or `name(key=value, ...)`, with the attributes of the class of that name as keys."""
    kinds: dict[str, Any] = {kind.name: kind for kind in (LearningRateSearch, BatchSizeSearch)}
    search: Search = parse_kind(text, kinds, "search", words=("memory", "launcher"))
    return search
