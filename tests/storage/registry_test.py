"""URLs as paths, and which storage a path belongs to."""

import os
import pathlib
import sys

import pytest

from tfdist.errors import InputError
from tfdist.storage import FileSystem, Url, path_of, register, registry, storage_of


class Other(FileSystem):
    """A storage that a package declares or a program registers."""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """An empty registry for one test."""
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    registry._storage.cache_clear()
    yield
    registry._storage.cache_clear()


def test_paths_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("~/run") == tmp_path / "run"
    assert path_of("runs/a") == pathlib.Path("runs/a")
    assert path_of("file:///runs/a") == pathlib.Path("/runs/a")
    assert isinstance(path_of(tmp_path), pathlib.Path)
    for path in ("runs", "file:///runs", tmp_path):
        assert type(storage_of(path)) is FileSystem
    with pytest.raises(InputError, match="Received: file://host/runs. Use file:///PATH"):
        path_of("file://host/runs")


def test_a_program_registers_a_storage():
    register("other", Other)
    assert path_of("other://bucket/run/") == Url("other", "bucket/run") == path_of(Url("other", "bucket//run"))
    assert type(storage_of("other://bucket/run")) is Other
    assert storage_of(Url("other", "bucket")) is storage_of("other://")


def test_an_installed_package_declares_a_storage(tmp_path, monkeypatch):
    declared = tmp_path / "of_another-1.dist-info"
    declared.mkdir()
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: of-another\nVersion: 1\n")
    (declared / "entry_points.txt").write_text("[tfdist.storage]\nother = of_another:Other\n")
    (tmp_path / "of_another.py").write_text("from tfdist.storage import FileSystem\nclass Other(FileSystem): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert type(storage_of("other://bucket/run")).__module__ == "of_another"
    sys.modules.pop("of_another")


def test_an_unknown_scheme_is_bad_input():
    register("other", Other)
    with pytest.raises(InputError) as caught:
        path_of("gs://bucket/run")
    known = str(caught.value).split("Received")[0]
    assert "file://" in known and "other://" in known
    assert "Received: gs://bucket/run. Use another path, install" in str(caught.value)


@pytest.mark.parametrize("scheme", ["file", "S3", "", "a/b", "a b"])
def test_a_scheme_is_a_word_of_its_own(scheme):
    with pytest.raises(ValueError, match="needs its own URL scheme"):
        register(scheme, Other)


def test_a_url_is_composed_as_a_path_is():
    url = Url("s3", "bucket//runs/first/")
    assert str(url) == "s3://bucket/runs/first"
    assert (url.name, str(url.parent), str(url / "a")) == ("first", "s3://bucket/runs", "s3://bucket/runs/first/a")
    assert str(url.with_name("second")) == "s3://bucket/runs/second"
    assert url / "a" / "b" == url / "a/b"
    assert sorted([url / "b", url / "a"]) == [url / "a", url / "b"]
    assert len({url, Url("s3", "bucket/runs/first")}) == 1
    assert Url("s3", "bucket").parent == Url("s3", "") == Url("s3", "").parent


def test_a_url_is_never_opened_as_a_file_of_this_machine():
    with pytest.raises(TypeError):
        os.fspath(Url("s3", "bucket"))
