"""The cache of Horovod's wheels: directories in which only their user may write, and a hash next to each wheel.

The hash, in a file for `sha256sum --check`, shows that a wheel is incomplete or was changed. It is no protection from somebody
who can change both files; owner and mode of the directories are.
"""

import hashlib
import os
import pathlib
import stat
import tempfile

from tfdist.errors import InputError


def make_private(folder: pathlib.Path) -> None:
    """Creates a directory, and its parents, unless it exists. A new one can be used by this user only.

    Raises:
      InputError: it belongs to another user, or others can write there.
      OSError: it cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise InputError(
            "The cache must be a directory of yours in which no one else may write, because code is installed from there. "
            f"Received: {folder}, of user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}. Run: "
            f"chmod go-w {folder}, or pass another --cache_dir."
        )


def add(wheel: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Moves a wheel into a directory on the same file system, records its hash, and returns its new path.

    A wheel that was there is replaced. If this is interrupted, the wheel has no hash, or the one of its predecessor, and so is
    not used.
    """
    line = _line(_hash(wheel), wheel)
    cached = wheel.replace(folder / wheel.name)
    descriptor, partial = tempfile.mkstemp(dir=folder)  # with mode 0600
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(line)
    os.replace(partial, _record(cached))
    return cached


def check(wheel: pathlib.Path) -> str:
    """Returns why a wheel of the cache must not be used; empty if it has the recorded hash."""
    try:
        recorded = _record(wheel).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "its hash was not recorded"
    found = _hash(wheel)
    return "" if recorded == _line(found, wheel) else f"its SHA-256 is {found} and not the recorded one"


def _record(wheel: pathlib.Path) -> pathlib.Path:
    return wheel.with_name(f"{wheel.name}.sha256")


def _line(sha256: str, wheel: pathlib.Path) -> str:
    return f"{sha256}  {wheel.name}\n"


def _hash(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
