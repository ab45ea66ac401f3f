"""A second storage: its files are in a directory, under mangled names that code bypassing the storage cannot guess."""

import contextlib
from pathlib import Path

from tfdist.storage import (
    AppendedFile,
    Entry,
    FileSystem,
    Info,
    NewFile,
    Storage,
    StoragePath,
    StoredFile,
    Url,
    register,
)


class MangledStorage(Storage):
    """Stores `SCHEME://a/b` in `ROOT/_61/_62`; counts the calls."""

    def __init__(self, root: Path):
        self._root, self._files = root, FileSystem()
        self.calls: set[str] = set()

    def _at(self, path: StoragePath, call: str) -> Path:
        assert isinstance(path, Url), f"{path!r} is of another storage"
        self.calls.add(call)
        return self._root.joinpath(*(f"_{name.encode().hex()}" for name in path.key.split("/") if name))

    def open(self, path: StoragePath) -> contextlib.AbstractContextManager[StoredFile]:
        return self._files.open(self._at(path, "open"))

    def create(self, path: StoragePath) -> contextlib.AbstractContextManager[NewFile]:
        return self._files.create(self._at(path, "create"))

    def append(self, path: StoragePath, *, is_new: bool = False) -> AppendedFile:
        return self._files.append(self._at(path, "append"), is_new=is_new)

    def replace(self, path: StoragePath, data: bytes) -> None:
        self._files.replace(self._at(path, "replace"), data)

    def remove(self, path: StoragePath) -> None:
        self._files.remove(self._at(path, "remove"))

    def lock(
        self, path: StoragePath, owner: bytes = b"", *, exclusive: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        return self._files.lock(self._at(path, "lock"), owner, exclusive=exclusive)

    def info(self, path: StoragePath) -> Info | None:
        return self._files.info(self._at(path, "info"))

    def entries(self, directory: StoragePath) -> list[Entry]:
        found = self._files.entries(self._at(directory, "entries"))
        return [Entry(bytes.fromhex(name.removeprefix("_")).decode(), is_directory) for name, is_directory in found]

    def make_directory(self, directory: StoragePath, *, is_new: bool = False) -> None:
        self._files.make_directory(self._at(directory, "make_directory"), is_new=is_new)

    def remove_directory(self, directory: StoragePath) -> None:
        self._files.remove_directory(self._at(directory, "remove_directory"))

    def rename(self, path: StoragePath, target: StoragePath) -> None:
        self._files.rename(self._at(path, "rename"), self._at(target, "rename"))

    def sync_directory(self, directory: StoragePath) -> None:
        self._files.sync_directory(self._at(directory, "sync_directory"))


def registered(root: Path) -> MangledStorage:
    """Registers and returns the storage of `test://`, in a directory."""
    storage = MangledStorage(root)
    register("test", lambda: storage)
    return storage
