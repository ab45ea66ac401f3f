"""The cache of wheels: owner and mode of its directories, and the hashes next to the wheels."""

import pathlib
import stat
import subprocess

import pytest

from tfdist.cli import wheel_cache


@pytest.fixture
def built(tmp_path: pathlib.Path) -> pathlib.Path:
    """A wheel next to the directory of the cache."""
    wheel = tmp_path / "a-1.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    return wheel


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "cache" / "wheels"
    wheel_cache.make_private(folder)
    return folder


def mode(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_is_private_and_one_that_others_can_read_is_used(folder: pathlib.Path):
    assert mode(folder) == 0o700
    folder.chmod(0o755)
    wheel_cache.make_private(folder)
    assert mode(folder) == 0o755


def test_a_wheel_is_moved_and_its_hash_recorded_for_sha256sum(built: pathlib.Path, folder: pathlib.Path):
    wheel = wheel_cache.add(built, folder)
    assert wheel == folder / built.name
    assert not built.exists()
    assert not wheel_cache.check(wheel)
    record = folder / f"{wheel.name}.sha256"
    assert mode(record) == 0o600
    assert set(folder.iterdir()) == {wheel, record}
    done = subprocess.run(["sha256sum", "--check", record.name], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == f"{wheel.name}: OK\n"


def test_a_wheel_that_replaces_another_has_its_own_hash(built: pathlib.Path, folder: pathlib.Path):
    wheel_cache.add(built, folder)
    built.write_bytes(b"another wheel")
    wheel = wheel_cache.add(built, folder)
    assert wheel.read_bytes() == b"another wheel"
    assert not wheel_cache.check(wheel)


def test_a_wheel_with_the_hash_of_its_predecessor_is_not_used(built, folder, monkeypatch: pytest.MonkeyPatch):
    wheel_cache.add(built, folder)
    built.write_bytes(b"another wheel")

    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.mkstemp", interrupt)
    with pytest.raises(KeyboardInterrupt):
        wheel_cache.add(built, folder)
    assert wheel_cache.check(folder / built.name).startswith("its SHA-256 is ")


def test_the_hash_of_another_file_is_not_the_wheel_s(built: pathlib.Path, folder: pathlib.Path):
    wheel = wheel_cache.add(built, folder)
    renamed = wheel.rename(folder / "b-1.0-py3-none-any.whl")
    assert wheel_cache.check(renamed) == "its hash was not recorded"
