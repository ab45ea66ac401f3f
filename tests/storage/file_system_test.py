import errno
import os

import pytest

from tfdist.storage import Entry, FileSystem, NotRegularFile
from tfdist.storage.registry import read_text

FILES = FileSystem()


def test_links_devices_and_pipes_are_not_opened(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a link, which is not followed") as caught:
        FILES.read(tmp_path / "link")
    assert caught.value.errno == errno.ELOOP
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(NotRegularFile):
            FILES.read(tmp_path / path)
    assert read_text(tmp_path / "link") == "text"  # of a file that the user names
    os.truncate(tmp_path / "file", 1 << 40)
    with pytest.raises(OSError, match="it has 1099511627776 bytes"):
        FILES.read(tmp_path / "file")


def test_a_link_to_a_directory_is_none_itself(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "nowhere").symlink_to(tmp_path / "b")
    found = [Entry("a", True), Entry("link", False), Entry("nowhere", False)]
    assert sorted(FILES.entries(tmp_path)) == found
    assert FILES.is_directory(tmp_path / "link")
    assert FILES.info(tmp_path / "nowhere") is None
    assert FILES.real_path(tmp_path / "link" / "c") == (tmp_path / "a" / "c").resolve()


def lock(path):
    with FILES.lock(path, b"text"):
        pass


def append(path):
    grown = FILES.append(path)
    grown.write(b"text")
    grown.close()


@pytest.mark.parametrize("write", [lock, append])
def test_nothing_is_written_through_a_link(write, tmp_path):
    """As in a run directory that somebody else has packed: the link refers to a file of the user who unpacks it."""
    (tmp_path / "precious").write_text("text")
    (tmp_path / "a").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError) as caught:
        write(tmp_path / "a")
    assert caught.value.errno == errno.ELOOP
    (tmp_path / "b").hardlink_to(tmp_path / "precious")
    with pytest.raises(NotRegularFile, match="a file with several hard links"):
        write(tmp_path / "b")
    (tmp_path / "c").symlink_to(tmp_path / "new")
    with pytest.raises(OSError):
        write(tmp_path / "c")
    os.mkfifo(tmp_path / "d")
    with pytest.raises(OSError):
        write(tmp_path / "d")
    assert (tmp_path / "precious").read_text() == "text" and not (tmp_path / "new").exists()


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_what_is_replaced_goes_through_no_link_either(link, tmp_path):
    (tmp_path / "precious").write_text("text")
    for name in ("a.partial", "a"):
        getattr(tmp_path / name, link)(tmp_path / "precious")
    FILES.replace(tmp_path / "a", b"new")
    assert (tmp_path / "precious").read_text() == "text"
    assert (tmp_path / "a").read_text() == "new" and not (tmp_path / "a").is_symlink()
    assert not (tmp_path / "a.partial").exists()


@pytest.mark.parametrize("action", ["create", "replace", "lock", "sync_directory", "append", "staged"])
def test_what_must_be_durable_is_flushed(action, tmp_path, monkeypatch):
    flushed = []
    true = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")), true(descriptor))
    )
    path = tmp_path / "a"
    expected = [path]
    if action == "create":
        with FILES.create(path) as file:
            file.write(b"text", 0)
            assert not flushed
    elif action == "replace":
        FILES.replace(path, b"text")
        expected = [tmp_path / "a.partial", tmp_path]
    elif action == "lock":
        with FILES.lock(path, b"text"):
            pass
    elif action == "append":
        grown = FILES.append(path)
        grown.write(b"text")
        assert not flushed
        grown.sync()
        grown.close()
    elif action == "staged":
        with FILES.staged(path) as staged:
            staged.mkdir()
            (staged / "b").write_text("text")
        expected = [staged / "b", staged, tmp_path]
    else:
        expected = [tmp_path]
        FILES.sync_directory(tmp_path)
    assert flushed == [str(one) for one in expected]


def test_where_nothing_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is not a directory"):
        FILES.check_writable(tmp_path / "file" / "a" / "b")
    # The superuser may write anywhere, so the system's answer is faked.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(PermissionError, match=f"no permission to write in {tmp_path}"):
        FILES.check_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
