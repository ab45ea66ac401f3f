import io
import os
import pathlib

import pytest

from tfdist.coordination import LocalGroup
from tfdist.errors import InputError
from tfdist.launcher.log_files import Log, log_directory


def test_a_directory_of_its_own_for_each_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [log_directory("", LocalGroup()) for _ in range(3)]
    assert len(set(found)) == 3
    for path in found:
        assert (
            path.is_dir() and path.parts[0] == "runs" and path.name.startswith("launch-") and not list(path.iterdir())
        )


def test_a_directory_that_is_named_is_made(tmp_path):
    assert log_directory(str(tmp_path / "a" / "b"), LocalGroup()) == tmp_path / "a" / "b"
    assert log_directory(str(tmp_path / "a" / "b"), LocalGroup()).is_dir()


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/nothing"])
def test_a_directory_that_cannot_be_written_is_bad_input(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").touch()
    with pytest.raises(InputError, match="--log_dir must be a writable directory"):
        log_directory(path, LocalGroup())


def test_a_log_goes_on_behind_what_is_there(tmp_path):
    for number, text in ((0, b"first"), (1, b"second"), (0, b"third")):
        with Log(tmp_path / "rank-0.log", number) as log:
            log.write(text + b"\n")
    lines = (tmp_path / "rank-0.log").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "first",
        "--- restart 1",
        "second",
        "--- another launch",
        "third",
    ]


def test_a_log_may_be_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "rank-0.log")
    with open(os.open(tmp_path / "rank-0.log", os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        with Log(tmp_path / "rank-0.log", 0) as log:
            log.write(b"one\n")
        assert reader.read() == b"one\n"


def test_a_log_on_a_full_disk_is_given_up_with_one_warning(caplog):
    with Log(pathlib.Path("/dev/full"), 0) as log:
        log.write(b"one\n")
        log.write(b"two\n")
    said = "tfdist.launch: /dev/full can no longer be written (No space left on device); the job continues without it."
    assert caplog.messages == [said]


def test_a_log_that_cannot_be_opened_again_is_given_up(tmp_path, caplog):
    with Log(tmp_path / "gone" / "rank-0.log", 1) as log:
        log.write(b"one\n")
    assert len(caplog.messages) == 1 and "(No such file or directory)" in caplog.messages[0]


def test_what_the_system_takes_in_parts_is_written_whole(tmp_path):
    class Slow(io.FileIO):
        def write(self, data):
            return super().write(bytes(data)[:3])

    with Log(tmp_path / "rank-0.log", 0) as log:
        log._file.close()
        log._file = Slow(tmp_path / "rank-0.log", "ab")
        log.write(b"0123456789\n")
    assert (tmp_path / "rank-0.log").read_bytes() == b"0123456789\n"
