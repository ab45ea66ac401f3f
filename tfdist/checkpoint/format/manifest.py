"""Reads and writes `manifest.json`: the contents of a checkpoint except the bytes of its tensors.

The file is canonical JSON that includes its own SHA-256. Both this and the meaning of `version` are the same in all versions
of the format.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tfdist.checkpoint.format.entries import Index, check, parse
from tfdist.coordination import Json
from tfdist.errors import CorruptCheckpointError, InputError
from tfdist.storage import StoragePath

VERSION = 1
FILE_NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Manifest(Index):
    """Contents of a manifest: the index of the tensors, and other values of the run."""

    step: int  # number of completed updates
    seed: int  # seed of the run
    flags: Mapping[str, Json]  # resolved flags of the run by name
    values: Json  # state other than tensors
    version: int = VERSION  # version of the format


def dump_with_hash(content: Mapping[str, Json]) -> bytes:
    """Returns canonical JSON of a mapping, including its own SHA-256.

    Raises:
      ValueError, TypeError: a value, such as inf, nan or an array, cannot be represented in JSON.
    """
    return _canonical({**content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()})


def load_with_hash(data: bytes) -> dict[str, Any]:
    """Returns the mapping that was passed to `dump_with_hash`.

    Raises:
      ValueError: the bytes are not a result of `dump_with_hash`.
    """
    try:
        content = json.loads(data)
        digest = content.pop("sha256")
        is_intact = isinstance(digest, str) and dump_with_hash(content) == data
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        is_intact = False
    if not is_intact:
        raise ValueError("its contents do not match its own hash")
    return content


def _canonical(content: Mapping[str, Json]) -> bytes:
    return (json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":")) + "\n").encode()


def dump(manifest: Manifest) -> bytes:
    """Returns the bytes of `manifest.json`, which `load` accepts.

    Raises:
      ValueError, TypeError: flags or values are not JSON, the blocks do not cover their tensors exactly once, or `load` would
        fail for another reason.
    """
    data = dump_with_hash(dataclasses.asdict(manifest))
    _parse(load_with_hash(data))
    return data


def load(path: StoragePath, data: bytes) -> Manifest:
    """Parses the contents of `manifest.json`; `path` is used only in error messages.

    Raises:
      CorruptCheckpointError: `data` is not a result of `dump`.
      InputError: the format version is newer than `VERSION`.
    """
    try:
        content = load_with_hash(data)
        version = content.get("version")
        if type(version) is not int or version <= VERSION:
            return _parse(content)
    except ValueError as error:
        raise CorruptCheckpointError(path, str(error)) from error
    raise InputError(
        f"This version of tfdist reads checkpoints up to format version {VERSION}. Received: {path}, with format version "
        f"{version}. Use the version of tfdist that wrote it, or a newer version."
    )


def _parse(content: dict[str, Any]) -> Manifest:
    manifest: Manifest = parse(Manifest, content, "the manifest")
    if manifest.version != VERSION:
        raise ValueError(f"format version {manifest.version} does not exist")
    if not 0 <= manifest.step < 2**63:
        raise ValueError(f"step is {manifest.step}, which is out of range")
    check(manifest)
    return manifest
