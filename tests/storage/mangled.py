"""A second storage: its files are in a directory, under mangled names that code bypassing the storage cannot guess."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist.storage import Entry, FileSystem, Storage, StoragePath, Url, register


def forwarded(name: str) -> Callable[..., Any]:
    """Returns a method that calls the one of the file system, at the mangled path."""
    return lambda self, path, *args, **options: getattr(self._files, name)(self._at(path, name), *args, **options)


class MangledStorage(Storage):
    """Stores `SCHEME://a/b` in `ROOT/_61/_62`; counts the calls."""

    open, create, append, replace = map(forwarded, ("open", "create", "append", "replace"))
    remove, lock, info, sync_directory = map(forwarded, ("remove", "lock", "info", "sync_directory"))
    make_directory, remove_directory = map(forwarded, ("make_directory", "remove_directory"))

    def __init__(self, root: Path):
        self._root, self._files = root, FileSystem()
        self.calls: set[str] = set()

    def _at(self, path: StoragePath, call: str) -> Path:
        assert isinstance(path, Url), f"{path!r} is of another storage"
        self.calls.add(call)
        return self._root.joinpath(*(f"_{name.encode().hex()}" for name in path.key.split("/") if name))

    def entries(self, directory: StoragePath) -> list[Entry]:
        found = self._files.entries(self._at(directory, "entries"))
        return [Entry(bytes.fromhex(name.removeprefix("_")).decode(), is_directory) for name, is_directory in found]

    def rename(self, path: StoragePath, target: StoragePath) -> None:
        self._files.rename(self._at(path, "rename"), self._at(target, "rename"))


def registered(root: Path) -> MangledStorage:
    """Registers and returns the storage of `test://`, in a directory."""
    storage = MangledStorage(root)
    register("test", lambda: storage)
    return storage
