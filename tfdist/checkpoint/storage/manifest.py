"""`manifest.json`: everything that a checkpoint says, except the bytes of its tensors.

The file is the canonical JSON of its content, with the SHA-256 of the rest in it, so that any other byte anywhere is found.
It is the same rule for all versions of the format, as is `version` itself.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.checkpoint.storage import json_validation
from tfdist.checkpoint.storage.entries import Index, check
from tfdist.coordination import Json
from tfdist.errors import Damaged, InputError

VERSION = 1
NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says.

    Attributes:
      step: how many steps the state has seen.
      seed: of the run.
      flags: the run's resolved flags by name.
      values: what else belongs to the state and is no tensor.
      index: the tensors, and where they are.
    """

    step: int
    seed: int
    flags: Mapping[str, Json]
    values: Json
    index: Index


def sealed(content: Mapping[str, Json]) -> bytes:
    """Returns canonical JSON of a mapping with the SHA-256 of itself in it.

    Raises:
      ValueError, TypeError: it has what is not JSON: inf, nan, an array.
    """
    return _canonical({**content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()})


def unsealed(data: bytes) -> dict[str, Any]:
    """Returns the mapping that `sealed` was given.

    Raises:
      ValueError: the bytes are not `sealed`'s.
    """
    try:
        content = json.loads(data)
        own = content.pop("sha256")
        is_intact = isinstance(own, str) and sealed(content) == data
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        is_intact = False
    if not is_intact:
        raise ValueError("its content is not what its own hash says")
    return content


def _canonical(content: Mapping[str, Json]) -> bytes:
    return (json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":")) + "\n").encode()


def dump(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`, which `load` accepts.

    Raises:
      ValueError, TypeError: flags or values are not JSON, the parts do not tile their tensors, or anything else for which
        `load` would refuse it.
    """
    data = sealed(
        {
            "version": VERSION,
            "step": manifest.step,
            "seed": manifest.seed,
            "flags": dict(manifest.flags),
            "values": manifest.values,
            **dump_index(manifest.index),
        }
    )
    _manifest(unsealed(data))
    return data


def dump_index(index: Index) -> dict[str, Json]:
    """An index as JSON."""
    return {
        "shards": dict(index.shards),
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "parts": [dataclasses.asdict(part) for part in tensor.parts],
            }
            for name, tensor in index.tensors.items()
        },
    }


def load(path: Path, data: bytes) -> Manifest:
    """Reads the bytes of `manifest.json`.

    Args:
      path: for messages.
      data: of the file.

    Raises:
      Damaged: they are not what `dump` returns for a possible checkpoint.
      InputError: a newer version of the format.
    """
    try:
        content = unsealed(data)
        version = json_validation.natural(content.get("version"), "version")
    except ValueError as error:
        raise Damaged(path, str(error)) from error
    if version > VERSION:
        raise InputError(
            f"A checkpoint must have a format that this version of tfdist reads, {VERSION}. "
            f"Received: {path} with format {version}. Continue with the tfdist that wrote it, or a newer one."
        )
    try:
        return _manifest(content)
    except ValueError as error:
        raise Damaged(path, str(error)) from error


def _manifest(content: dict[str, Any]) -> Manifest:
    own = json_validation.fields(content, "manifest", "version", "step", "seed", "flags", "values", "shards", "tensors")
    if own["version"] != VERSION:
        raise ValueError(f"there is no version {own['version']}")
    index = json_validation.index({"shards": own["shards"], "tensors": own["tensors"]})
    check(index)
    return Manifest(
        step=json_validation.natural(own["step"], "step"),
        seed=json_validation.integer(own["seed"], "seed"),
        flags=json_validation.mapping(own["flags"], "flags"),
        values=own["values"],
        index=index,
    )
