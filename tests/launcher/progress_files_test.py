"""The progress files of the ranks, as managed by their launcher."""

import errno
import pathlib
import shutil

import pytest

from tfdist.cluster import progress_file
from tfdist.errors import InputError
from tfdist.launcher.output_forwarding import ProgressFiles


def write(path: pathlib.Path | None, step: int, forbids: bool = False) -> None:
    environment = {progress_file.VARIABLE: str(path)}
    note = progress_file.ProgressFile(environment)
    note.note(step)
    note.close()
    if forbids:
        progress_file.forbid_restart(environment)


@pytest.fixture
def memory(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "memory"
    path.mkdir()
    return path


def test_the_last_step_of_any_rank_counts(memory):
    notes = ProgressFiles(memory)
    paths = [notes.create(rank) for rank in range(3)]
    assert notes.read(range(3)) == (None, False)
    write(paths[0], 7), write(paths[2], 5, forbids=True)
    assert notes.read(range(3)) == (7, True) and notes.read([0, 1]) == (7, False)
    notes.create(0), notes.create(2)
    assert notes.read(range(3)) == (None, False)


@pytest.mark.parametrize("emptied", [".", "notes", "notes/rank-1"])
def test_what_somebody_has_removed_was_not_noted_and_is_made_anew(emptied, memory):
    notes = ProgressFiles(memory)
    for rank in range(2):
        write(notes.create(rank), 7)
    gone = memory / emptied
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    kept = 7 if "rank" in emptied else None
    assert notes.read(range(2)) == (kept, False) == notes.read(range(2))
    write(notes.create(1), 9)
    assert notes.read(range(2)) == (9, False)


def test_a_rank_that_forbids_a_restart_is_heard_in_an_emptied_directory_too(memory):
    notes = ProgressFiles(memory)
    path = notes.create(0)
    shutil.rmtree(memory)
    write(path, 7, forbids=True)
    assert notes.read([0]) == (None, True)


def full(path: pathlib.Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_memory_that_is_full_at_first_is_bad_input(memory, monkeypatch):
    monkeypatch.setattr(progress_file, "create", full)
    with pytest.raises(InputError, match=r"notes/rank-0 \(No space left on device\)\. Free up space there"):
        ProgressFiles(memory).create(0)
