"""The contract of storage backends; add a new backend to the fixture `storage`."""

import errno
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.storage import Entry


def write(storage, path, data: bytes) -> None:
    with storage.create(path) as file:
        file.write(data, 0)


def names(storage, directory) -> list[str]:
    return sorted(entry.name for entry in storage.entries(directory))


def test_ranges_are_written_and_read_by_threads(storage, home):
    data = bytes(range(256)) * 64
    ranges = [(at, data[at : at + 1000]) for at in range(0, len(data), 1000)]
    with storage.create(home / "a") as file, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: file.write(memoryview(each[1]), each[0]), reversed(ranges)))
        file.on_range_written(0, len(data))
    assert storage.read(home / "a") == data
    with storage.open(home / "a") as file:
        assert file.size == len(data)
        found = bytearray(len(data))
        done = 0
        while done < len(found):
            done += file.read_into(memoryview(found)[done : done + 700], done)
        assert found == data
        assert file.read_into(memoryview(bytearray(5)), len(data)) == 0


def test_a_file_is_created_once_and_errors_name_it(storage, home):
    write(storage, home / "a", b"first")
    with pytest.raises(FileExistsError, match="a"), storage.create(home / "a"):
        pass
    with pytest.raises(FileNotFoundError), storage.create(home / "no" / "a"):
        pass
    assert storage.read(home / "a") == b"first"
    with pytest.raises(OSError, match="full") as caught, storage.create(home / "b"):
        raise OSError(errno.ENOSPC, "full")
    assert caught.value.filename


def test_only_files_are_opened(storage, home):
    with pytest.raises(OSError, match="not a regular file"), storage.open(home):
        pass
    with pytest.raises(FileNotFoundError), storage.open(home / "a"):
        pass


def test_a_file_grows(storage, home):
    for text in (b"one", b"two"):
        file = storage.append(home / "a")
        file.write(text)
        assert storage.read(home / "a").endswith(text)
        file.sync()
        file.close()
    assert storage.read(home / "a") == b"onetwo"
    with pytest.raises(FileExistsError):
        storage.append(home / "a", is_new=True)
    storage.append(home / "b", is_new=True).close()
    assert storage.read(home / "b") == b""


def test_a_file_is_replaced(storage, home):
    for text in (b"long text", b"short"):
        storage.replace(home / "a", text)
        assert storage.read(home / "a") == text
    assert names(storage, home) == ["a"]
    write(storage, home / "b", b"renamed")
    storage.rename(home / "b", home / "a")
    assert (names(storage, home), storage.read(home / "a")) == (["a"], b"renamed")


def test_what_is_at_a_path(storage, home):
    assert storage.info(home / "a") is None
    assert not storage.exists(home / "a" / "b")
    write(storage, home / "a", b"text")
    assert storage.info(home / "a")[:2] == (False, 4)
    assert storage.info(home / "a" / "b") is None
    assert storage.is_directory(home) and not storage.is_directory(home / "a")
    assert storage.real_path(home / "a") == home / "a"
    storage.check_writable(home / "b" / "c")
    storage.make_directory(home / "c")
    assert sorted(storage.entries(home)) == [Entry("a", False), Entry("c", True)]
    storage.remove(home / "a")
    assert not storage.exists(home / "a")
    with pytest.raises(FileNotFoundError):
        storage.read(home / "a")


def test_directories(storage, home):
    storage.make_directory(home / "a" / "b")
    storage.make_directory(home / "a" / "b")
    with pytest.raises(FileExistsError):
        storage.make_directory(home / "a", is_new=True)
    with pytest.raises(FileNotFoundError):
        storage.make_directory(home / "c" / "d", is_new=True)
    write(storage, home / "a" / "b" / "file", b"text")
    storage.sync_directory(home / "a" / "b")
    storage.rename(home / "a", home / "e")
    assert names(storage, home) == ["e"]
    assert storage.read(home / "e" / "b" / "file") == b"text"
    storage.remove_directory(home / "e")
    assert names(storage, home) == []
    for action in (storage.entries, storage.remove_directory):
        with pytest.raises(FileNotFoundError):
            action(home / "e")


def test_one_process_locks(storage, home):
    with storage.lock(home / "lock", b"this\n"):
        assert storage.read(home / "lock") == b"this\n"
        with pytest.raises(BlockingIOError), storage.lock(home / "lock", b"that\n"):
            pass
        assert storage.read(home / "lock") == b"this\n"
    with storage.lock(home / "lock", b"this\n", exclusive=False), storage.lock(home / "lock"):
        pass
    with storage.lock(home / "lock"):
        assert storage.read(home / "lock") == b""
    with pytest.raises(FileNotFoundError), storage.lock(home / "no" / "lock"):
        pass


def test_what_a_library_writes_is_there_when_it_is_complete(storage, home):
    for text in ("old", "new"):
        with storage.staged(home / "a.keras") as local:
            assert local.name == "a.keras"
            local.write_text(text)
            assert not [name for name in names(storage, home) if not name.startswith(".a.keras.")] or text == "new"
        assert storage.read(home / "a.keras").decode() == text
    with storage.staged(home / "model") as local:
        (local / "inner").mkdir(parents=True)
        (local / "inner" / "file").write_text("text")
    assert storage.read(home / "model" / "inner" / "file") == b"text"
    with pytest.raises(KeyError), storage.staged(home / "b") as local:
        local.write_text("half of it")
        raise KeyError
    with pytest.raises(OSError), storage.staged(home / "model") as local:  # a directory is in the way
        local.write_text("a file")
    assert names(storage, home) == ["a.keras", "model"]


def test_what_killed_processes_left_of_it_is_removed(storage, home):
    for name in ("a", "b", ".a.partial", ".ab.partial"):
        write(storage, home / name, b"")
    storage.make_directory(home / ".a.x1y2" / "a")
    storage.clean_staged(home / "a")
    assert names(storage, home) == [".ab.partial", "a", "b"]
