"""Storage of the durable files of a run: one interface, `Storage`, and its implementation for file systems.

    storage_of(path).read(path)              the storage is chosen by the scheme of the path
    register("s3", S3Storage)                for a program; an installed package declares it as an entry point

Checkpoints, run directories and exported models are read and written through it, so that another storage, such as an
object store, is one file and one line in `registry.py`. This package does not depend on their contents.

Files that belong to a machine are not accessed through it: in-memory checkpoints (/dev/shm) and their exchange between hosts,
progress files of launchers, builds of Horovod, data sets, and files that TensorFlow writes itself (profiles).
"""

from tfdist.storage.file_system import FileSystem
from tfdist.storage.interface import (
    AnyPath,
    AppendedFile,
    Entry,
    Info,
    LockFile,
    NewFile,
    NotRegularFile,
    Storage,
    StoragePath,
    StoredFile,
    Url,
)
from tfdist.storage.registry import path_of, register, storage_of

__all__ = [
    "AnyPath",
    "AppendedFile",
    "Entry",
    "FileSystem",
    "Info",
    "LockFile",
    "NewFile",
    "NotRegularFile",
    "Storage",
    "StoragePath",
    "StoredFile",
    "Url",
    "path_of",
    "register",
    "storage_of",
]
