"""Names the library's datasets, finds their files, and reports missing files."""

import glob
import hashlib
import os

from tfdist.config import spec
from tfdist.errors import InputError, did_you_mean

# Name of the argument after the colon, by dataset; "" for none. `tfdist.data.catalog` has a function for each.
COLON_ARGUMENTS = {
    "digits": "",
    "fashion_mnist": "",
    "mnist5k": "",
    "text": "",
    "csv": "path",
    "images": "path",
    "npz": "path",
    "synthetic": "shape",
    "tfds": "name",
    "tfrecord": "path",
}
# Datasets that a run directory may name in safe mode; the files of tensorflow-datasets name modules to import.
SAFE_DATASETS = "|".join(
    f"{name}(:.*)?" if argument else name for name, argument in COLON_ARGUMENTS.items() if name != "tfds"
)
DATASETS = tuple(f"{name}:" if argument else name for name, argument in COLON_ARGUMENTS.items())
_EXISTS = {"file": os.path.isfile, "folder": os.path.isdir}


def _resolve_path(path: str, data_dir: str | None) -> str:
    """Returns a path with ~ expanded; relative paths are relative to `data_dir`, if it is set."""
    if not isinstance(path, str) or not path:
        raise InputError(
            f'A dataset of files needs a path. Received: {path!r}. Specify it after the colon, or as path="...".'
        )
    folder = os.path.expanduser(data_dir) if data_dir else ""
    return os.path.join(folder, os.path.expanduser(path))


def find_path(kind: str, path: str, data_dir: str | None, file_type: str = "file") -> str:
    """Returns the resolved path of a "file" or "folder"; the `InputError` for a missing one suggests a similar name."""
    resolved_path = _resolve_path(path, data_dir)
    if not _EXISTS[file_type](resolved_path):
        raise _missing_error(kind, file_type, resolved_path)
    return resolved_path


def matching_files(kind: str, pattern: str, data_dir: str | None) -> list[str]:
    """Returns the files that match a pattern, such as `**/*.tfrecord`, sorted; raises `InputError` if none does."""
    location = _resolve_path(pattern, data_dir)
    files = sorted(path for path in glob.glob(location, recursive=True) if os.path.isfile(path))
    if not files:
        raise _missing_error(kind, "file", location)
    return files


def check_files(name: str, data_dir: str | None) -> None:
    """Raises `InputError` if the files of a dataset are missing, without loading it or importing a library."""
    parsed = spec.parse(name)
    kind, _, argument = parsed.name.partition(":")
    if COLON_ARGUMENTS.get(kind) == "path" and (path := argument or parsed.args.get("path")):
        if kind == "tfrecord":
            matching_files(kind, path, data_dir)
        else:
            find_path(kind, path, data_dir, "folder" if kind == "images" else "file")


def checksum_of(content: bytes) -> int:
    """Returns a checksum in [-2**63, 2**63), which processes use to compare their files."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def _missing_error(kind: str, file_type: str, path: str) -> InputError:
    folder, name = os.path.split(path.rstrip(os.sep))
    try:
        entries = [entry for entry in os.listdir(folder or ".") if _EXISTS[file_type](os.path.join(folder, entry))]
        location = f"in {folder or os.getcwd()}"
    except OSError:
        entries, location = [], f"and no folder {folder}"
    return InputError(
        f"The dataset {kind} must name a {file_type} on this machine. Received: {path}; there is no {file_type} {name} "
        f"{location}.{did_you_mean(name, entries)}"
    )
