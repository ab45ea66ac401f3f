import pytest

from tests.storage.mangled import MangledStorage
from tfdist.storage import FileSystem, Storage, StoragePath, Url


@pytest.fixture(params=["file system", "mangled"])
def storage(request, tmp_path) -> Storage:
    return FileSystem() if request.param == "file system" else MangledStorage(tmp_path / "root")


@pytest.fixture
def home(storage, tmp_path) -> StoragePath:
    """An empty directory of the storage."""
    directory = tmp_path / "home" if isinstance(storage, FileSystem) else Url("test", "bucket/home")
    storage.make_directory(directory)
    return directory
