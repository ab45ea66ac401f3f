"""Parses an index from untrusted JSON: only values of the right type and in range are accepted.

Each function returns its first argument, or raises a ValueError that names the problem.
"""

import re
from typing import Any

from tfdist.checkpoint.format import files
from tfdist.checkpoint.format.entries import Index, PartEntry, TensorEntry

_SHARD = re.compile(r"shard-[0-9]{5,9}\.safetensors")  # a name in the checkpoint's own directory, without a path
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**63 - 1


def integer(value: Any, what: str) -> int:
    """Checks for an integer, excluding bool."""
    if type(value) is not int:
        raise ValueError(f"{what} is {value!r:.40}, not an integer")
    return value


def natural(value: Any, what: str) -> int:
    """Checks for an integer in [0, 2**63)."""
    if not 0 <= integer(value, what) <= _LARGEST:
        raise ValueError(f"{what} is {value!r:.40}")
    return value


def text(value: Any, what: str, pattern: re.Pattern[str] | None = None) -> str:
    """Checks for a string that fully matches the pattern."""
    if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
        raise ValueError(f"{what} is {value!r:.80}")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Checks for a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {value!r:.40}, not a mapping")
    return value


def fields(value: Any, what: str, *names: str) -> dict[str, Any]:
    """Checks for a JSON object with exactly these names."""
    if mapping(value, what).keys() != set(names):
        raise ValueError(f"{what} has {', '.join(sorted(value)) or 'nothing':.80}, not {', '.join(names)}")
    return value


def sequence(value: Any, what: str) -> list[Any]:
    """Checks for a JSON array."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is {value!r:.40}, not a list")
    return value


def _lengths(value: Any, what: str) -> tuple[int, ...]:
    return tuple(natural(length, what) for length in sequence(value, what))


def index(value: Any) -> Index:
    """Parses the result of `manifest.dump_index`; does not check whether it is consistent."""
    values = fields(value, "index", "shards", "tensors")
    sizes = mapping(values["shards"], "shards").items()
    tensors = mapping(values["tensors"], "tensors").items()
    return Index(
        {text(file, "a shard's name", _SHARD): natural(size, f"the size of {file}") for file, size in sizes},
        {name: _tensor(tensor, name) for name, tensor in tensors},
    )


def _tensor(value: Any, name: str) -> TensorEntry:
    values = fields(value, name, "dtype", "shape", "parts")
    dtype = text(values["dtype"], f"the type of {name}")
    if dtype not in files.DTYPES:
        raise ValueError(f"the type of {name} is {dtype!r:.40}")
    parts = tuple(_part(part, f"a block of {name}") for part in sequence(values["parts"], f"parts of {name}"))
    return TensorEntry(dtype, _lengths(values["shape"], f"the shape of {name}"), parts)


def _part(value: Any, what: str) -> PartEntry:
    values = fields(value, what, "file", "key", "offset", "shape", "sha256")
    return PartEntry(
        file=text(values["file"], f"the file of {what}", _SHARD),
        key=text(values["key"], f"the key of {what}"),
        offset=_lengths(values["offset"], f"the offset of {what}"),
        shape=_lengths(values["shape"], f"the shape of {what}"),
        sha256=tuple(
            text(digest, f"a hash of {what}", _SHA256) for digest in sequence(values["sha256"], f"hashes of {what}")
        ),
    )
