"""`tfdist train` with in-memory checkpoints (commits): which of them a killed and restarted run resumes from."""

import errno
import os
import pathlib
import shutil

import pytest

from tests.checkpoint.damaging import flip_last
from tests.end_to_end.resume.command_test import run, shown, weights
from tests.end_to_end.resume.exact_test import tensors
from tests.selection import quick
from tfdist import ledger
from tfdist.checkpoint import in_memory
from tfdist.checkpoint.format import complete_checkpoints
from tfdist.cli import run as command
from tfdist.cli.resume import Origin
from tfdist.errors import InputError
from tfdist.reporting import RunDirectory

DIED_AT, END = 37, 50
GIVEN = {"steps": END, "checkpoint_every": "20", "commit_every": 5, "log_every": 1}


class Died(Exception):
    """Simulates the death of a process."""


@pytest.fixture
def memory(tmp_path, monkeypatch) -> pathlib.Path:
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setenv(in_memory.DIRECTORY_VARIABLE, str(path))
    return path


def die(path: pathlib.Path, at: int = DIED_AT, **flags) -> None:
    def note(_, step):
        if step >= at:
            raise Died

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Died):
        patch.setattr("tfdist.trainer.fit_loop.ProgressFile.note", note)
        run(path, **(GIVEN | flags))


def go_on(path: pathlib.Path, **flags) -> list[int]:
    """Completes the run; returns the steps at which its starts began."""
    run(path, **(GIVEN | flags))
    return begun_at(path)


def begun_at(path: pathlib.Path) -> list[int]:
    return [start["step"] for start in RunDirectory(path).read_starts()]


def commits_of(path: pathlib.Path) -> list[pathlib.Path]:
    return complete_checkpoints(RunDirectory(path).read_starts()[-1]["commits"])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("tfdist.cli.")]
    return [record.getMessage() for record in ours if record.levelname == "WARNING"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """A run that was killed, made once: the directory that it was made in, and a copy of it and of its commits."""
    place, copy = (tmp_path_factory.mktemp(name) for name in ("place", "copy"))
    (place / "memory").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(in_memory.DIRECTORY_VARIABLE, str(place / "memory"))
        die(place / "run")
    shutil.copytree(place, copy, dirs_exist_ok=True)
    return place, copy


@pytest.fixture
def died(killed, monkeypatch) -> pathlib.Path:
    """The run that was killed, where it was made, since it records absolute paths; `memory` is next to it."""
    place, copy = killed
    shutil.rmtree(place)
    shutil.copytree(copy, place)
    monkeypatch.setenv(in_memory.DIRECTORY_VARIABLE, str(place / "memory"))
    return place / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    run(path, steps=END, checkpoint_every="20", log_every=1)
    return path


def test_a_run_that_died_goes_on_from_its_last_commit(whole, died, capsys):
    path, memory = died, died.with_name("memory")
    assert [checkpoint.name[-2:] for checkpoint in commits_of(path)] == ["35", "30"]
    assert go_on(path) == [0, 35]
    assert weights(path) == weights(whole)
    assert shown(path) == shown(whole)
    assert RunDirectory(path).read_starts()[1]["checkpoint"].startswith(str(memory))
    dropped = RunDirectory(path).dropped.read_text()
    assert dropped.count('"step": 36') == 1 and '"step": 35' not in dropped
    assert ledger.main(str(path)) == 0
    assert "Proved: 50 steps, 2 attempts." in capsys.readouterr().out
    assert commits_of(path) == []


def test_a_launcher_that_was_started_again_has_another_directory(whole, died, tmp_path, monkeypatch):
    """The commits of the former launcher are kept until the new start has its own."""
    path = died
    monkeypatch.setenv(in_memory.DIRECTORY_VARIABLE, str(tmp_path / "another"))
    die(path, at=38)
    die(path, at=43)
    assert begun_at(path) == [0, 35, 35]
    assert go_on(path) == [0, 35, 35, 40]
    assert weights(path) == weights(whole)


@pytest.mark.parametrize(
    ("every", "where"), [("20", "checkpoints"), ("0", "memory"), pytest.param("15", "memory", marks=pytest.mark.full)]
)
def test_a_damaged_commit_is_left_out(every, where, whole, memory, tmp_path, caplog):
    """The previous commit is used; at the same step, the durable checkpoint."""
    path = tmp_path / "run"
    die(path, at=26, checkpoint_every=every)
    [shard] = commits_of(path)[0].glob("shard-*")
    flip_last(shard)
    assert go_on(path, checkpoint_every=every) == [0, 20]
    assert "step-000000025.damaged" in caplog.text
    assert where in RunDirectory(path).read_starts()[1]["checkpoint"]
    if every == "20":
        assert weights(path) == weights(whole)


def test_without_checkpoints_there_is_a_proof_too(whole, memory, tmp_path, capsys):
    path = tmp_path / "run"
    die(path, checkpoint_every="0")
    assert go_on(path, checkpoint_every="0") == [0, 35]
    assert complete_checkpoints(path / "checkpoints") == []
    assert ledger.main(str(path)) == 0
    assert "Proved: 50 steps, 2 attempts." in capsys.readouterr().out
    assert tensors(commits_of(path)[0]) == weights(whole)


def test_when_the_memory_is_gone_the_checkpoint_is_taken(whole, died):
    shutil.rmtree(died.with_name("memory"))
    assert go_on(died) == [0, 20]
    assert weights(died) == weights(whole)


def test_and_without_one_the_run_begins_again_and_says_so(memory, tmp_path, capsys, caplog):
    path = tmp_path / "run"
    die(path, checkpoint_every="0")
    die(path, at=36, checkpoint_every="0")
    assert "step 0" not in caplog.text
    shutil.rmtree(memory)
    assert go_on(path, checkpoint_every="0") == [0, 35, 0]
    [said] = [text for text in warnings(caplog) if "step 0" in text]
    assert "No checkpoint of this run's 2 earlier attempts exists, so the run starts at step 0" in said
    assert f"the old records are in {path}/metrics-dropped.jsonl." in said
    assert '"step": 36' in RunDirectory(path).dropped.read_text()
    assert said in (path / "logs" / "rank-0.log").read_text()
    assert ledger.main(str(path)) == 0
    assert "Proved: 50 steps" in capsys.readouterr().out


@pytest.mark.parametrize("records", [1, 100])
def test_a_run_that_was_never_saved_says_so_too(records, tmp_path, caplog):
    """Also if only the ledger shows that it has trained."""
    path = tmp_path / "run"
    flags = {"checkpoint_every": "0", "commit_every": 0} if records == 1 else {"commit_dir": str(tmp_path / "commits")}
    die(path, at=4, log_every=records, **flags)
    go_on(path, steps=5, log_every=records, **flags)
    [said] = warnings(caplog)
    assert "No checkpoint of this run's earlier attempt exists, so the run starts at step 0" in said
    assert ("metrics-dropped.jsonl" in said) == RunDirectory(path).dropped.exists() == (records == 1)


def test_a_start_that_did_not_come_to_a_step_has_nothing_to_lose(tmp_path, caplog):
    path = tmp_path / "run"
    die(path, at=0, commit_every=0)
    go_on(path, steps=5, commit_every=0)
    assert warnings(caplog) == []


@pytest.mark.parametrize("every", quick(["20", "600s", "0"], "600s", "0"))
def test_commits_in_the_launcher_s_memory_alone_are_a_warning(every, memory, tmp_path, caplog):
    run(tmp_path / "run", steps=1, checkpoint_every=every, commit_every=5)
    run(tmp_path / "other", steps=1, checkpoint_every=every, commit_every=5, commit_dir=str(tmp_path / "mine"))
    said = ["Received: --commit_every=5 with --checkpoint_every=0. Add" in text for text in warnings(caplog)]
    assert said == [True] * (every == "0")


def test_or_begins_with_what_it_began_with(whole, memory, tmp_path):
    path, base = tmp_path / "run", str(whole / "checkpoints" / "step-000000020")
    die(path, checkpoint_every="0", resume=base)
    die(path, at=36, checkpoint_every="0", resume=base)
    shutil.rmtree(memory)
    assert go_on(path, checkpoint_every="0", resume=base) == [20, 35, 20]


def test_a_copy_of_a_run_has_no_commits(died, tmp_path):
    """Otherwise, the copy would use commits that the run makes later."""
    shutil.copytree(died, tmp_path / "copy")
    assert go_on(tmp_path / "copy") == [0, 20]
    assert go_on(died) == [0, 35]


def test_a_run_that_begins_anew_has_no_commits(died):
    shutil.rmtree(died)
    die(died, at=23)
    assert begun_at(died) == [0]
    assert go_on(died) == [0, 20]


def test_commits_that_a_start_went_back_behind_are_not_taken(died, tmp_path, capsys):
    """A start that did not see them has repeated their steps with another learning rate."""
    path, memory = died, died.with_name("memory")
    hidden = memory.rename(tmp_path / "hidden")
    die(path, at=23, commit_every=0, learning_rate=0.5)
    hidden.rename(memory)
    assert go_on(path, learning_rate=0.5) == [0, 20, 20]
    assert ledger.main(str(path)) == 0
    assert "Proved: 50 steps" in capsys.readouterr().out


class TwoHosts:
    """A strategy with two processes; `sees` is what the second one sees."""

    is_chief = True
    rank = 0

    def __init__(self, *sees):
        self.group, self._sees = self, list(sees)

    def gather(self, name, value):
        return [value, [*self._sees]] if isinstance(value, list) else [value, *self._sees]

    def broadcast(self, name, value):
        return value


def test_commits_that_a_process_does_not_see_are_left_out_and_removed(died, caplog):
    path = died
    found = Origin([str(p) for p in [*commits_of(path), path / "checkpoints" / "step-000000020"]], True)
    seen = command._drop_invisible(found, RunDirectory(path), TwoHosts(False, True, True))
    assert seen.checkpoints == found.checkpoints[1:]
    assert "step-000000035; using the newest checkpoint that all of them see" in caplog.text
    alone = found._replace(checkpoints=found.checkpoints[:1])
    assert (
        command._drop_invisible(alone, RunDirectory(path), TwoHosts(False)) == alone
    )  # restoring reports what is wrong
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_drop_invisible", lambda origin, *_: origin._replace(checkpoints=found.checkpoints[2:]))
        die(path, at=23)
    assert begun_at(path) == [0, 20]
    assert commits_of(path) == []


def test_each_start_has_a_folder_and_takes_along_what_it_goes_on_from(whole, died):
    """So that old commits on a host that was temporarily missing are never attributed to the run; it dies twice."""
    path, memory = died, died.with_name("memory")
    [first] = memory.iterdir()
    die(path, at=38)
    [second] = memory.iterdir()
    assert first != second
    assert [commit.name[-2:] for commit in complete_checkpoints(second)] == ["35"]
    shutil.copytree(second, first)
    (first / "step-000000035").rename(first / "step-000000040")
    assert go_on(path) == [0, 35, 35]
    assert weights(path) == weights(whole)


def test_what_cannot_be_taken_along_stays_where_it_is(died, monkeypatch, whole):
    def refused(source, target):
        if "step-" in str(target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(source, target)

    path, memory, link = died, died.with_name("memory"), os.link
    with monkeypatch.context() as patch:
        patch.setattr("os.link", refused)
        die(path, at=38)
        assert sorted(len(complete_checkpoints(folder)) for folder in memory.iterdir()) == [0, 2]
    assert go_on(path) == [0, 35, 35]
    assert weights(path) == weights(whole)
    assert len(list(memory.iterdir())) == 1


def test_a_directory_that_is_given_comes_before_the_launcher_s():
    assert in_memory.required_parent(5, "mine", {in_memory.DIRECTORY_VARIABLE: "launcher's"}) == "mine"
    assert in_memory.required_parent(5, "", {in_memory.DIRECTORY_VARIABLE: "launcher's"}) == "launcher's"
    assert in_memory.required_parent(0, "", {in_memory.DIRECTORY_VARIABLE: "launcher's"}) == ""
    assert in_memory.required_parent(0, "", {}) == ""


def test_a_directory_that_others_can_write_to_is_refused(tmp_path, monkeypatch):
    """Whoever can exchange a commit chooses what the run resumes from."""
    (tmp_path / "mine").mkdir()
    assert in_memory.required_parent(5, str(tmp_path / "mine"), {}) == str(tmp_path / "mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert in_memory.required_parent(5, str(tmp_path / "link"), {}) == str(tmp_path / "link")
    os.lchown(tmp_path / "link", 12345, -1)
    with pytest.raises(InputError, match=f"--commit_dir={tmp_path}/link, which is owned by another user"):
        in_memory.required_parent(5, str(tmp_path / "link"), {})
    (tmp_path / "mine").chmod(0o770)
    with pytest.raises(InputError, match=f"--commit_dir={tmp_path}/mine, which is writable by other users"):
        run(tmp_path / "run", steps=5, commit_every=5, commit_dir=str(tmp_path / "mine"))
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InputError, match=f"--commit_dir={tmp_path}, which is owned by another user"):
        in_memory.required_parent(5, str(tmp_path), {})


def test_new_directories_are_private(tmp_path):
    run(tmp_path / "run", steps=5, commit_every=5, commit_dir=str(tmp_path / "new"))
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "new", *(tmp_path / "new").iterdir())] == [0o700] * 2
