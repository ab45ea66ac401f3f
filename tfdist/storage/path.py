"""Paths of files in a storage: `pathlib.Path` for file systems, `Url` for other storages."""

import dataclasses
import os
from typing import Protocol, Self, TypeAlias


class StoragePath(Protocol):
    """A path in some storage, as text only; `storage_of(path)` accesses what is there.

    A `pathlib.Path` is one, but its methods that read or write files would only work on this machine.
    """

    @property
    def name(self) -> str:
        """The last component."""

    @property
    def parent(self) -> Self:
        """The path without the last component."""

    def with_name(self, name: str, /) -> Self:
        """Returns the path with another last component."""

    def __truediv__(self, name: str, /) -> Self: ...

    def __lt__(self, other: Self, /) -> bool: ...

    def __hash__(self) -> int: ...


AnyPath: TypeAlias = str | os.PathLike[str] | StoragePath  # accepted from users


@dataclasses.dataclass(frozen=True, order=True)
class Url:
    """A path of a storage that is not this machine's file system, such as `gs://bucket/runs/first`.

    It is not an `os.PathLike`, so that it cannot be opened as a local file by mistake.

    Attributes:
      scheme: what comes before `://`.
      key: what comes after it: components separated by single slashes, without one at either end.
    """

    scheme: str
    key: str

    def __post_init__(self) -> None:
        """Normalizes the slashes."""
        object.__setattr__(self, "key", "/".join(filter(None, self.key.split("/"))))

    @property
    def name(self) -> str:
        """See `StoragePath`."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        """See `StoragePath`. The root is its own parent."""
        return Url(self.scheme, self.key.rpartition("/")[0])

    def with_name(self, name: str, /) -> "Url":
        """See `StoragePath`."""
        return self.parent / name

    def __truediv__(self, name: str, /) -> "Url":
        return Url(self.scheme, f"{self.key}/{name}")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"
