"""The data sets that the library has, where their files are, and errors about missing files."""

import functools
import glob
import hashlib
import os
from collections.abc import Callable

from tfdist.config import spec
from tfdist.errors import InputError
from tfdist.errors.formatting import did_you_mean

# The argument that may follow a name and a colon; "" for none. `tfdist.data.catalog` has a function for each name.
AFTER_COLON = {
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
# Those that a run directory may name in safe mode. Files of tensorflow-datasets name Python modules that it imports.
OF_RUNS = "|".join(f"{name}(:.*)?" if argument else name for name, argument in AFTER_COLON.items() if name != "tfds")
DATA_SETS = tuple(f"{name}:" if argument else name for name, argument in AFTER_COLON.items())


_EXISTS = {"file": os.path.isfile, "folder": os.path.isdir}


def located(path: str, data_dir: str | None) -> str:
    """Returns a path with ~ expanded; a relative one is in `data_dir`, unless that is empty."""
    if not isinstance(path, str) or not path:
        raise InputError(
            f'A data set of files needs a path. Received: {path!r}. Write it after the colon, or path="...".'
        )
    folder = os.path.expanduser(data_dir) if data_dir else ""
    return os.path.join(folder, os.path.expanduser(path))


def existing(kind: str, path: str, data_dir: str | None, what: str = "file") -> str:
    """Returns the location of a file, or of a "folder".

    Raises:
      InputError: there is no such file or folder; suggests a similar name.
    """
    location = located(path, data_dir)
    if not _EXISTS[what](location):
        raise _missing(kind, what, location)
    return location


def matching_files(kind: str, pattern: str, data_dir: str | None) -> list[str]:
    """Returns the files that match a pattern, such as `train-*.tfrecord` or `**/*.tfrecord`, in sorted order.

    Raises:
      InputError: there are none.
    """
    location = located(pattern, data_dir)
    files = sorted(path for path in glob.glob(location, recursive=True) if os.path.isfile(path))
    if not files:
        raise _missing(kind, "file", location)
    return files


_FILES: dict[str, Callable[[str, str, str | None], object]] = {
    "csv": existing,
    "images": functools.partial(existing, what="folder"),
    "npz": existing,
    "tfrecord": matching_files,
}


def check_files(name: str, data_dir: str | None) -> None:
    """Raises `InputError` if the files of a data set are missing, as loading it does, without importing a library."""
    parsed = spec.parse(name)
    kind, _, argument = parsed.name.partition(":")
    if kind in _FILES and (path := argument or parsed.args.get(AFTER_COLON[kind])):
        _FILES[kind](kind, path, data_dir)


def checksum_of(content: bytes) -> int:
    """Returns a checksum, in [-2**63, 2**63), by which processes see whether they have the same files."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def _missing(kind: str, what: str, path: str) -> InputError:
    folder, name = os.path.split(path.rstrip(os.sep))
    try:
        there = [entry for entry in os.listdir(folder or ".") if _EXISTS[what](os.path.join(folder, entry))]
        place = f"in {folder or os.getcwd()}"
    except OSError:
        there, place = [], f"and no folder {folder}"
    return InputError(
        f"The data set {kind} must name a {what} on this machine. Received: {path}; there is no {what} {name} {place}."
        f"{did_you_mean(name, there)}"
    )
