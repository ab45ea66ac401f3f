"""Storage backends by URL scheme. Each backend of this repository is one line in `_BACKENDS`."""

import functools
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from tfdist.errors import InputError
from tfdist.storage.file_system import FileSystem
from tfdist.storage.interface import AnyPath, Storage, StoragePath, Url

_BACKENDS: dict[str, Callable[[], Storage]] = {"file": FileSystem}

ENTRY_POINTS = "tfdist.storage"  # group in which an installed package declares storage backends by scheme
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


def register(scheme: str, storage: Callable[[], Storage]) -> None:
    """Registers the storage backend for all paths `SCHEME://...` in this process.

    Args:
      scheme: a lower-case letter, then lower-case letters, digits, `+`, `.` or `-`.
      storage: class, or function that returns a `Storage`; called once.
    """
    if not _URL.fullmatch(f"{scheme}://") or scheme == "file":
        raise ValueError(f"A storage backend needs its own URL scheme, such as `s3`. Received: {scheme!r}.")
    _BACKENDS[scheme] = storage
    _storage.cache_clear()


def path_of(path: AnyPath) -> StoragePath:
    """Converts a path to a `pathlib.Path`, with `~` expanded, or a `Url`.

    Raises:
      InputError: no backend is registered for its scheme, or a file URL contains a host.
    """
    if not isinstance(path, str | os.PathLike):
        return path
    text = os.fspath(path)
    match = _URL.fullmatch(text)
    if match is None:
        return pathlib.Path(os.path.expanduser(text))
    scheme, key = match.groups()
    if scheme == "file":
        if not key.startswith("/"):
            raise InputError(f"A file URL must have three slashes and no host. Received: {text}. Use file:///PATH.")
        return pathlib.Path(key)
    if _storage(scheme) is None:
        schemes = ", ".join(f"{name}://" for name in sorted({*_BACKENDS, *_entry_points()}))
        raise InputError(
            f"A path must be local, or begin with the scheme of a known storage backend: {schemes}. Received: {text}. "
            "Use another path, install a package that provides this backend, or call tfdist.storage.register."
        )
    return Url(scheme, key)


def storage_of(path: AnyPath) -> Storage:
    """Returns the storage backend of a path.

    Raises:
      InputError: no backend is registered for its scheme.
    """
    location = path_of(path)
    storage = _storage(location.scheme if isinstance(location, Url) else "file")
    assert storage is not None, f"{location} was created without path_of"
    return storage


@functools.cache
def _storage(scheme: str) -> Storage | None:
    if scheme in _BACKENDS:
        return _BACKENDS[scheme]()
    load_backend = _entry_points().get(scheme)
    return load_backend()() if load_backend else None


def _entry_points() -> dict[str, Callable[[], Any]]:
    """Returns the functions that load the backends of installed packages, by scheme."""
    # Imported here because it takes 15 ms, and most runs use the file system.
    from importlib.metadata import entry_points

    return {point.name: point.load for point in entry_points(group=ENTRY_POINTS)}


def read_text(file: AnyPath) -> str:
    """Returns the text of a file that the user specified; a link to a regular file is followed.

    Raises:
      OSError, UnicodeDecodeError: the file cannot be read, or is not UTF-8 text.
    """
    path = path_of(file)
    storage = storage_of(path)
    return storage.read(storage.real_path(path)).decode()


def read_user_file(file: AnyPath, rule: str) -> str:
    """Same as `read_text`, but errors are `InputError`s that begin with `rule`, a sentence: what the file must be."""
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"{rule} Received: {file}: {reason}") from error
