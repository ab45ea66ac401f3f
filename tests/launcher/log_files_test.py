import contextlib
import pathlib

from tfdist.coordination import LocalGroup
from tfdist.launcher.output_forwarding import Log, log_directory


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


def test_a_log_goes_on_behind_what_is_there(tmp_path):
    for number, text in ((0, b"first"), (1, b"second"), (0, b"third")):
        with contextlib.closing(Log(tmp_path / "rank-0.log", number)) as log:
            log.write(text + b"\n")
    lines = (tmp_path / "rank-0.log").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "first",
        "--- restart 1",
        "second",
        "--- another launch",
        "third",
    ]


def test_a_log_on_a_full_disk_is_given_up_with_one_warning(caplog, monkeypatch):
    monkeypatch.setattr("tfdist.storage.file_system.stat.S_ISREG", lambda mode: True)
    with contextlib.closing(Log(pathlib.Path("/dev/full"), 0)) as log:
        log.write(b"one\n")
        log.write(b"two\n")
    said = "tfdist launch: /dev/full can no longer be written (No space left on device); the job continues without it."
    assert caplog.messages == [said]
