"""Commits: when they are made, what becomes of those that fail, and which of them a run goes on from."""

import errno
import logging
import os
import pathlib
import re
import shutil
import signal
import time

import pytest

import tfdist
from tests.resume.command_test import run, shown, weights
from tests.resume.exact_test import FEEDBACK, IMAGES, LABELS, STEPS, make_trainer, tensors
from tests.resume.saving_test import At, steps_of
from tfdist import beginning, commits, ledger
from tfdist.checkpoint import Checkpoint, committing, newest
from tfdist.config import TrainConfig
from tfdist.errors import InputError, Preempted
from tfdist.reporting import RunDirectory
from tfdist.resuming import Origin
from tfdist.run_state import RunState

DIED_AT, END = 37, 50


def fit(trainer, path, steps=STEPS, callbacks=(), **options):
    options = {"every": "5", "commit_every": 3, "in_background": False} | options
    saved = tfdist.Checkpoints(directory=str(path / "disk"), commit_directory=str(path / "memory"), **options)
    return trainer.fit(
        (IMAGES, LABELS), batch_size=8, steps=steps, steps_per_call=4, checkpoints=saved, callbacks=callbacks
    )


def test_both_kinds_are_made_and_commits_go_when_the_end_is_saved(single, tmp_path):
    seen = []
    look = At(11, lambda: seen.extend((steps_of(tmp_path / "disk"), steps_of(tmp_path / "memory"))))
    fit(make_trainer(single), tmp_path, callbacks=[look])
    assert seen == [[10, 5], [9, 6]]
    assert (steps_of(tmp_path / "disk"), steps_of(tmp_path / "memory")) == ([12, 10, 5], [])


def test_without_checkpoints_the_commits_stay(single, tmp_path):
    fit(make_trainer(single), tmp_path, every="0")
    assert (steps_of(tmp_path / "disk"), steps_of(tmp_path / "memory")) == ([], [12, 9])


def test_a_commit_has_the_bits_of_a_checkpoint_and_both_are_copied_once(mirrored2, tmp_path, monkeypatch):
    copies = []
    parts = RunState.parts
    monkeypatch.setattr(RunState, "parts", lambda state: copies.append(state) or parts(state))
    saved = [tmp_path / "copy-10", tmp_path / "copy-5"]
    look = At(11, lambda: [shutil.copytree(*each) for each in zip(newest(tmp_path / "memory"), saved, strict=True)])
    fit(make_trainer(mirrored2, **FEEDBACK), tmp_path, 11, [look], commit_every=5)
    assert len(copies) == 3  # of steps 5, 10 and 11
    durable, commit = (newest(tmp_path / kind) for kind in ("disk", "memory"))
    assert commit == []
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "disk")
    fit(make_trainer(mirrored2, compression="topk(ratio=0.1)", compression_min_bytes=0), tmp_path, 11, every="0")
    fit(
        make_trainer(mirrored2, compression="topk(ratio=0.1)", compression_min_bytes=0),
        tmp_path / "other",
        9,
        every="9",
    )
    assert tensors(newest(tmp_path / "memory")[0]) == tensors(newest(tmp_path / "other" / "disk")[0])
    assert durable


def test_what_cannot_be_written_is_one_warning_and_harms_none_before(single, tmp_path, monkeypatch, caplog):
    write, full = committing.write_shard, []

    def limited(directory, rank, parts):
        if full and "memory" in str(directory):
            raise OSError(errno.ENOSPC, "No space left on device", str(directory))
        return write(directory, rank, parts)

    monkeypatch.setattr(committing, "write_shard", limited)
    with caplog.at_level(logging.WARNING):
        fit(make_trainer(single), tmp_path, 10, [At(3, lambda: full.append(1))], every="0", commit_every=1)
    assert steps_of(tmp_path / "memory") == [2, 1]
    for path in newest(tmp_path / "memory"):
        Checkpoint.open(path).verify()
    [warning] = [record.getMessage() for record in caplog.records]
    assert "part of a commit. Received, for step-000000003: rank 0: [Errno 28] No space left on device" in warning
    assert warning.endswith("The run goes on; the next commit is tried.")
    full.clear()
    trainer = make_trainer(single)
    assert trainer.resume(tmp_path / "disk", tmp_path / "memory") == 2
    fit(trainer, tmp_path, 10, every="0", commit_every=1)
    assert steps_of(tmp_path / "memory") == [10, 9]


def test_a_library_s_run_goes_on_from_the_newest_of_both(single, tmp_path):
    fit(make_trainer(single), tmp_path / "whole", every="100")
    fit(make_trainer(single), tmp_path, 10, every="0")
    trainer = make_trainer(single)
    assert trainer.resume(tmp_path / "disk", tmp_path / "memory") == 9
    fit(trainer, tmp_path, every="100")
    assert tensors(newest(tmp_path / "disk")[0]) == tensors(newest(tmp_path / "whole" / "disk")[0])


def test_a_run_that_is_preempted_has_a_checkpoint_and_keeps_its_commits(single, tmp_path):
    stop = At(4, lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.5)))
    with pytest.raises(Preempted, match="which is saved in .*disk"):
        fit(make_trainer(single), tmp_path, 100, [stop], every="0")
    [stopped], kept = steps_of(tmp_path / "disk"), steps_of(tmp_path / "memory")
    assert kept and kept[0] <= stopped
    trainer = make_trainer(single)
    assert trainer.resume(tmp_path / "disk", tmp_path / "memory") == stopped


def test_commits_of_another_run_are_in_the_way(single, tmp_path):
    fit(make_trainer(single), tmp_path, every="0")
    with pytest.raises(InputError, match="needs a directory without later checkpoints. .*memory"):
        fit(make_trainer(single), tmp_path, every="0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"commit_every": 3},
            "give commit_every of at least 1 and commit_directory or neither. Received: commit_every=3",
        ),
        ({"commit_directory": "b"}, "Received: commit_every=0, commit_directory='b'"),
        ({"commit_every": -1, "commit_directory": "b"}, "Received: commit_every=-1"),
        ({"commit_every": 3, "commit_directory": "a/"}, "each has a directory. Received for both: a."),
    ],
)
def test_what_is_no_place_for_commits(options, message):
    with pytest.raises(InputError, match=message):
        tfdist.Checkpoints(directory="a", **options)


class Died(Exception):
    """Stands for the end of a process."""


@pytest.fixture
def memory(tmp_path, monkeypatch) -> pathlib.Path:
    """What a launcher has made."""
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setenv(commits.VARIABLE, str(path))
    return path


def die(path: pathlib.Path, at: int = DIED_AT, **flags) -> None:
    """A start that ends behind a step, without a word."""

    def note(_, step):
        if step >= at:
            raise Died

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Died):
        patch.setattr("tfdist.training.StepNote.note", note)
        run(path, **({"steps": END, "checkpoint_every": "20", "commit_every": 5, "log_every": 1} | flags))


def go_on(path: pathlib.Path, **flags) -> list[int]:
    """Makes the run to its end; returns the steps at which it began."""
    run(path, **({"steps": END, "checkpoint_every": "20", "commit_every": 5, "log_every": 1} | flags))
    return begun_at(path)


def begun_at(path: pathlib.Path) -> list[int]:
    return [start["step"] for start in RunDirectory(path).beginnings()]


def commits_of(path: pathlib.Path) -> list[pathlib.Path]:
    return newest(RunDirectory(path).beginnings()[-1]["commits"])


def damage(checkpoint: pathlib.Path) -> None:
    [shard] = checkpoint.glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    """The run that nobody ends."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    run(path, steps=END, checkpoint_every="20", log_every=1)
    return path


def test_a_run_that_died_goes_on_from_its_last_commit(whole, memory, tmp_path, capsys):
    path = tmp_path / "run"
    die(path)
    assert [checkpoint.name[-2:] for checkpoint in commits_of(path)] == ["35", "30"]
    assert go_on(path) == [0, 35]
    assert weights(path) == weights(whole)
    assert shown(path) == shown(whole)
    assert RunDirectory(path).beginnings()[1]["checkpoint"].startswith(str(memory))
    dropped = RunDirectory(path).dropped.read_text()
    assert dropped.count('"step": 36') == 1 and '"step": 35' not in dropped
    assert ledger.main(str(path)) == 0
    assert "Proved: 50 steps, 2 starts." in capsys.readouterr().out
    assert commits_of(path) == []


def test_it_dies_again_before_its_next_commit(whole, memory, tmp_path):
    path = tmp_path / "run"
    die(path)
    die(path, at=38)
    assert go_on(path) == [0, 35, 35]
    assert weights(path) == weights(whole)


def test_a_launcher_that_was_started_again_has_another_directory(whole, memory, tmp_path, monkeypatch):
    """The commits of the one before are still there, until the new start has its own."""
    path = tmp_path / "run"
    die(path)
    monkeypatch.setenv(commits.VARIABLE, str(tmp_path / "another"))
    die(path, at=38)
    die(path, at=43)
    assert begun_at(path) == [0, 35, 35]
    assert go_on(path) == [0, 35, 35, 40]
    assert weights(path) == weights(whole)


@pytest.mark.parametrize(("every", "where"), [("20", "checkpoints"), ("0", "memory"), ("15", "memory")])
def test_a_damaged_commit_is_left_out(every, where, whole, memory, tmp_path, caplog):
    """The one before is taken; of one step the durable one."""
    path = tmp_path / "run"
    die(path, at=26, checkpoint_every=every)
    damage(commits_of(path)[0])
    assert go_on(path, checkpoint_every=every) == [0, 20]
    assert "step-000000025.damaged" in caplog.text
    assert where in RunDirectory(path).beginnings()[1]["checkpoint"]
    if every == "20":
        assert weights(path) == weights(whole)


def test_without_checkpoints_there_is_a_proof_too(whole, memory, tmp_path, capsys):
    path = tmp_path / "run"
    die(path, checkpoint_every="0")
    assert go_on(path, checkpoint_every="0") == [0, 35]
    assert newest(path / "checkpoints") == []
    assert ledger.main(str(path)) == 0
    assert "Proved: 50 steps, 2 starts." in capsys.readouterr().out
    assert tensors(commits_of(path)[0]) == weights(whole)


def test_when_the_memory_is_gone_the_checkpoint_is_taken(whole, memory, tmp_path):
    path = tmp_path / "run"
    die(path)
    shutil.rmtree(memory)
    assert go_on(path) == [0, 20]
    assert weights(path) == weights(whole)


def test_and_without_one_the_run_begins_again(memory, tmp_path, capsys):
    path = tmp_path / "run"
    die(path, checkpoint_every="0")
    die(path, at=36, checkpoint_every="0")
    shutil.rmtree(memory)
    assert go_on(path, checkpoint_every="0") == [0, 35, 0]
    assert ledger.main(str(path)) == 0
    assert "Proved: 50 steps" in capsys.readouterr().out


def test_or_begins_with_what_it_began_with(whole, memory, tmp_path):
    path, base = tmp_path / "run", str(whole / "checkpoints" / "step-000000020")
    die(path, checkpoint_every="0", resume=base)
    die(path, at=36, checkpoint_every="0", resume=base)
    shutil.rmtree(memory)
    assert go_on(path, checkpoint_every="0", resume=base) == [20, 35, 20]


def test_a_copy_of_a_run_has_no_commits(memory, tmp_path):
    """It would take those that the run makes later."""
    path = tmp_path / "run"
    die(path)
    shutil.copytree(path, tmp_path / "copy")
    assert go_on(tmp_path / "copy") == [0, 20]
    assert go_on(path) == [0, 35]


def test_a_run_that_begins_anew_has_no_commits(memory, tmp_path):
    path = tmp_path / "run"
    die(path)
    shutil.rmtree(path)
    die(path, at=23)
    assert begun_at(path) == [0]
    assert go_on(path) == [0, 20]


def test_commits_that_a_start_went_back_behind_are_not_taken(memory, tmp_path, monkeypatch, capsys):
    """A start that did not see them made its steps again, at another rate."""
    path = tmp_path / "run"
    die(path)
    hidden = memory.rename(tmp_path / "hidden")
    die(path, at=23, commit_every=0, learning_rate=0.5)
    hidden.rename(memory)
    assert go_on(path, learning_rate=0.5) == [0, 20, 20]
    assert ledger.main(str(path)) == 0
    assert "Proved: 50 steps" in capsys.readouterr().out


class TwoHosts:
    """A strategy of two processes, of which the second sees what is said."""

    is_chief = True
    rank = 0

    def __init__(self, *sees):
        self.group, self._sees = self, list(sees)

    def gather(self, name, value):
        return [value, [*self._sees]] if isinstance(value, list) else [value, *self._sees]

    def broadcast(self, name, value):
        return value


def test_commits_that_a_process_does_not_see_are_left_out_and_removed(memory, tmp_path, caplog):
    path = tmp_path / "run"
    die(path)
    found = Origin([str(p) for p in [*commits_of(path), path / "checkpoints" / "step-000000020"]], True)
    seen = beginning._seen_by_all(found, RunDirectory(path), TwoHosts(False, True, True))
    assert seen.checkpoints == found.checkpoints[1:]
    assert "step-000000035; the newest that they see is taken" in caplog.text
    alone = found._replace(checkpoints=found.checkpoints[:1])
    assert (
        beginning._seen_by_all(alone, RunDirectory(path), TwoHosts(False)) == alone
    )  # to say what is wrong is restore's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beginning, "_seen_by_all", lambda origin, *_: origin._replace(checkpoints=found.checkpoints[2:]))
        die(path, at=23)
    assert begun_at(path) == [0, 20]
    assert commits_of(path) == []


def test_a_directory_that_a_process_does_not_share_is_refused(memory, tmp_path):
    config = TrainConfig(commit_every=5)
    directory = RunDirectory(tmp_path / "run")
    folder = beginning._commit_folder(config, directory, 0, TwoHosts(True))
    assert folder.startswith(str(memory))
    directory.begin("", ["alpha"], facts={"commits": folder})
    assert beginning._commit_folder(config, directory, 0, TwoHosts(True)) == folder
    shutil.rmtree(folder)  # another host's may have that name, and must not pass for one that is shared
    assert beginning._commit_folder(config, directory, 0, TwoHosts(True)) != folder
    with pytest.raises(
        InputError, match="all on one host. Received: .*memory.*, which is another one for rank 1. Leave out"
    ):
        beginning._commit_folder(config, directory, 0, TwoHosts(False))


def test_commits_without_a_directory_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(commits.VARIABLE, raising=False)
    with pytest.raises(
        InputError, match="Received: --commit_every=5, without --commit_dir, and without TFDIST_COMMITS"
    ):
        run(tmp_path / "run", commit_every=5)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a directory that can be written. Received: .*file"):
        run(tmp_path / "run", steps=5, commit_every=5, commit_dir=str(tmp_path / "file"))


def test_a_directory_that_is_given_comes_before_the_launcher_s():
    assert commits.home(5, "mine", {commits.VARIABLE: "launcher's"}) == "mine"
    assert commits.home(5, "", {commits.VARIABLE: "launcher's"}) == "launcher's"
    assert commits.home(0, "", {commits.VARIABLE: "launcher's"}) == ""
    assert commits.home(0, "", {}) == ""


@pytest.mark.parametrize(
    ("saver", "loader", "words"),
    [
        (
            "mirrored4",
            "mirrored2",
            "2 replicas go on where 4 stopped: .* replica r takes over that of r [+] 2, r [+] 4, ...",
        ),
        ("mirrored2", "mirrored4", "4 replicas go on where 2 stopped: .*; replicas from 2 on begin with nothing."),
        ("mirrored2", "mirrored2", ""),
    ],
)
def test_what_becomes_of_error_feedback_is_told(saver, loader, words, tmp_path, request, caplog):
    fit(make_trainer(request.getfixturevalue(saver), **FEEDBACK), tmp_path, 3, every="0")
    trainer = make_trainer(request.getfixturevalue(loader), **FEEDBACK)
    trainer.resume(tmp_path / "disk", tmp_path / "memory")
    with caplog.at_level(logging.INFO, "tfdist"):
        fit(trainer, tmp_path, 6, every="0")
    said = [record.getMessage() for record in caplog.records if "compression has not sent" in record.getMessage()]
    assert len(said) == bool(words)
    assert not words or re.fullmatch(words, said[0])


def test_nothing_is_told_where_nobody_keeps_anything(mirrored2, mirrored4, tmp_path, caplog):
    fit(make_trainer(mirrored2), tmp_path, 3, every="0")
    trainer = make_trainer(mirrored4)
    trainer.resume(tmp_path / "disk", tmp_path / "memory")
    with caplog.at_level(logging.INFO, "tfdist"):
        fit(trainer, tmp_path, 6, every="0")
    assert "has not sent" not in caplog.text
