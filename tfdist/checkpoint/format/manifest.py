"""`manifest.json`: the contents of a checkpoint except the bytes of its tensors.

The file is canonical JSON that includes its own SHA-256. This, and the meaning of `version`, holds for all versions.
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
NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Manifest(Index):
    """Contents of a manifest: an index and more values."""

    step: int  # number of completed updates
    seed: int  # seed of the run
    flags: Mapping[str, Json]  # resolved flags of the run by name
    values: Json  # state other than tensors
    version: int = VERSION  # version of the format


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
    data = seal(dataclasses.asdict(manifest))
    _parse(unseal(data))
    return data


def load(path: StoragePath, data: bytes) -> Manifest:
    """Parses the contents of `manifest.json`, whose path is for messages.

    Raises:
      CorruptCheckpointError: the bytes are not a result of `dump`.
      InputError: the format has a newer version.
    """
    try:
        content = unseal(data)
        version = content.get("version")
        if type(version) is not int or version <= VERSION:
            return _parse(content)
    except ValueError as error:
        raise CorruptCheckpointError(path, str(error)) from error
    raise InputError(
        f"A checkpoint must have a format that this version of tfdist reads, {VERSION}. "
        f"Received: {path} with format {version}. Use the version of tfdist that wrote it, or a newer one."
    )


def _parse(content: dict[str, Any]) -> Manifest:
    manifest: Manifest = parse(Manifest, content, "the manifest")
    if manifest.version != VERSION:
        raise ValueError(f"there is no version {manifest.version}")
    if not 0 <= manifest.step < 2**63:
        raise ValueError(f"step is {manifest.step}")
    check(manifest)
    return manifest
