"""`manifest.json`: the contents of a checkpoint except the bytes of its tensors.

The file is canonical JSON that includes its own SHA-256. This, and the meaning of `version`, holds for all versions.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tfdist.checkpoint.format import json_validation
from tfdist.checkpoint.format.entries import Index, check
from tfdist.coordination import Json
from tfdist.errors import CorruptCheckpointError, InputError
from tfdist.storage import StoragePath

VERSION = 1
NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of a manifest.

    Attributes:
      step: number of completed updates.
      seed: seed of the run.
      flags: resolved flags of the run by name.
      values: state other than tensors.
      index: the tensors and their locations.
    """

    step: int
    seed: int
    flags: Mapping[str, Json]
    values: Json
    index: Index


def seal(content: Mapping[str, Json]) -> bytes:
    """Returns canonical JSON of a mapping, including its own SHA-256.

    Raises:
      ValueError, TypeError: a value cannot be represented in JSON: inf, nan, an array.
    """
    return _canonical({**content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()})


def unseal(data: bytes) -> dict[str, Any]:
    """Returns the mapping that was passed to `seal`.

    Raises:
      ValueError: the bytes are not a result of `seal`.
    """
    try:
        content = json.loads(data)
        digest = content.pop("sha256")
        is_intact = isinstance(digest, str) and seal(content) == data
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        is_intact = False
    if not is_intact:
        raise ValueError("its content does not match its own hash")
    return content


def _canonical(content: Mapping[str, Json]) -> bytes:
    return (json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":")) + "\n").encode()


def dump(manifest: Manifest) -> bytes:
    """Returns the bytes of `manifest.json`, which `load` accepts.

    Raises:
      ValueError, TypeError: flags or values are not JSON, the parts do not tile their tensors, or `load` would fail
        for another reason.
    """
    data = seal(
        {
            "version": VERSION,
            "step": manifest.step,
            "seed": manifest.seed,
            "flags": dict(manifest.flags),
            "values": manifest.values,
            **dump_index(manifest.index),
        }
    )
    _manifest(unseal(data))
    return data


def dump_index(index: Index) -> dict[str, Json]:
    """Returns an index as JSON."""
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


def load(path: StoragePath, data: bytes) -> Manifest:
    """Parses the bytes of `manifest.json`.

    Args:
      path: path of the file, for messages.
      data: contents of the file.

    Raises:
      CorruptCheckpointError: the bytes are not a result of `dump`.
      InputError: the format has a newer version.
    """
    try:
        content = unseal(data)
        version = json_validation.natural(content.get("version"), "version")
    except ValueError as error:
        raise CorruptCheckpointError(path, str(error)) from error
    if version > VERSION:
        raise InputError(
            f"A checkpoint must have a format that this version of tfdist reads, {VERSION}. "
            f"Received: {path} with format {version}. Use the version of tfdist that wrote it, or a newer one."
        )
    try:
        return _manifest(content)
    except ValueError as error:
        raise CorruptCheckpointError(path, str(error)) from error


def _manifest(content: dict[str, Any]) -> Manifest:
    values = json_validation.fields(
        content, "manifest", "version", "step", "seed", "flags", "values", "shards", "tensors"
    )
    if values["version"] != VERSION:
        raise ValueError(f"there is no version {values['version']}")
    index = json_validation.index({"shards": values["shards"], "tensors": values["tensors"]})
    check(index)
    return Manifest(
        step=json_validation.natural(values["step"], "step"),
        seed=json_validation.integer(values["seed"], "seed"),
        flags=json_validation.mapping(values["flags"], "flags"),
        values=values["values"],
        index=index,
    )
