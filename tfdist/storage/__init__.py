"""Storage of the durable files of a run: checkpoints, run directories and exported models.

Installed packages can add storages for URL schemes such as `s3`, which `registry` looks up. Files that are local to a machine
do not use a storage: in-memory checkpoints, datasets, and TensorFlow's profiles.
"""

from tfdist.storage.file_system import FileSystem
from tfdist.storage.interface import (
    AnyPath,
    AppendedFile,
    Entry,
    Info,
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
