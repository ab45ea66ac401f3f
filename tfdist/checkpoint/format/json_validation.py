"""Parses an index from untrusted JSON.

Each check returns its first argument, or raises a ValueError that names the problem.
"""

import re
from typing import Any

from tfdist.checkpoint.format import files
from tfdist.checkpoint.format.entries import Index, PartEntry, TensorEntry

_SHARD = re.compile(r"shard-[0-9]{5,9}\.safetensors")  # a name in the checkpoint's directory, without a path
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**63 - 1


def integer(value: Any, label: str) -> int:
    """Checks for an integer, excluding bool."""
    if type(value) is not int:
        raise ValueError(f"{label} is {value!r:.40}, not an integer")
    return value


def natural(value: Any, label: str) -> int:
    """Checks for an integer in [0, 2**63)."""
    if not 0 <= integer(value, label) <= _LARGEST:
        raise ValueError(f"{label} is {value!r:.40}")
    return value


def text(value: Any, label: str, pattern: re.Pattern[str] | None = None) -> str:
    """Checks for a string that fully matches the pattern."""
    if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
        raise ValueError(f"{label} is {value!r:.80}")
    return value


def mapping(value: Any, label: str) -> dict[str, Any]:
    """Checks for a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{label} is {value!r:.40}, not a mapping")
    return value


def fields(value: Any, label: str, *names: str) -> dict[str, Any]:
    """Checks for a JSON object with exactly the given names."""
    if mapping(value, label).keys() != set(names):
        raise ValueError(f"{label} has {', '.join(sorted(value)) or 'nothing':.80}, not {', '.join(names)}")
    return value


def sequence(value: Any, label: str) -> list[Any]:
    """Checks for a JSON array."""
    if not isinstance(value, list):
        raise ValueError(f"{label} is {value!r:.40}, not a list")
    return value


def _lengths(value: Any, label: str) -> tuple[int, ...]:
    return tuple(natural(length, label) for length in sequence(value, label))


def index(value: Any) -> Index:
    """Parses the result of `manifest.dump_index`, without checking its consistency."""
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


def _part(value: Any, label: str) -> PartEntry:
    values = fields(value, label, "file", "key", "offset", "shape", "sha256")
    return PartEntry(
        file=text(values["file"], f"the file of {label}", _SHARD),
        key=text(values["key"], f"the key of {label}"),
        offset=_lengths(values["offset"], f"the offset of {label}"),
        shape=_lengths(values["shape"], f"the shape of {label}"),
        sha256=tuple(
            text(digest, f"a hash of {label}", _SHA256) for digest in sequence(values["sha256"], f"hashes of {label}")
        ),
    )
