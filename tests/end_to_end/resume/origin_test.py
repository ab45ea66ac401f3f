"""What a run begins with, depending on --resume and the contents of its directory."""

import errno
import os

import numpy as np
import pytest

from tfdist.checkpoint.format import TensorBlock, write_checkpoint
from tfdist.cli.resume import FIXED_FLAGS, finished_message, origin
from tfdist.cli.weights import weight_files
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError
from tfdist.reporting import RunDirectory

FLAGS = {name: f"its {name}" for name in FIXED_FLAGS} | {"steps": 10, "strategy": "single", "commit_dir": ""}
TEXT = "".join(f"--{name}={value}\n" for name, value in FLAGS.items())


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def begun(directory: RunDirectory, *saved: int, flags=FLAGS, job_name="") -> RunDirectory:
    directory.begin(TEXT, ["alpha"], facts={"job_name": job_name})
    for step in saved:
        save(directory, step, flags)
    return directory


def save(directory: RunDirectory, step: int, flags=FLAGS) -> None:
    parts = [TensorBlock.full("model/w", np.zeros(3))]
    write_checkpoint(LocalGroup(), directory.checkpoints, parts, step=step, seed=0, flags=flags, values={}, keep=9)


def paths(directory: RunDirectory, *steps: int) -> list[str]:
    return [str(directory.checkpoints / f"step-{step:09d}") for step in steps]


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_new_directory_is_a_beginning(resume, directory):
    assert origin(resume, directory, FLAGS) == ([], False)
    assert not directory.path.exists()


@pytest.mark.parametrize(
    "look", [origin, finished_message, lambda resume, directory, _: weight_files(str(directory.path), "best")]
)
def test_a_directory_that_may_not_be_entered_is_bad_input(look, directory, monkeypatch):
    def refuse(path, **_):  # the superuser may enter any
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(InputError, match=r"must be accessible. Received: .*run.* \(Permission denied\)"):
        look("auto", directory, FLAGS)


def test_a_run_goes_on_from_its_newest_checkpoint(directory):
    begun(directory, 5, 20, 10)
    given = FLAGS | {"steps": 99, "strategy": "mirrored"}
    assert origin("auto", directory, given) == (paths(directory, 20, 10, 5), True)
    directory.model.write_text("done")
    assert origin("auto", directory, FLAGS) == (paths(directory, 20, 10, 5), True), "a run that ended goes on, too"


def test_a_run_that_died_before_its_first_checkpoint_begins_again(directory):
    begun(directory)
    assert origin("auto", directory, FLAGS) == ([], True)


@pytest.mark.parametrize("name", FIXED_FLAGS)
def test_other_flags_than_the_run_s(name, directory):
    begun(directory, 5)
    with pytest.raises(InputError, match=f"Received: --{name}=other, but .* belongs to a run with --{name}=its {name}"):
        origin("auto", directory, FLAGS | {name: "other"})


def somebody_else_s(directory: RunDirectory) -> None:
    directory.path.mkdir()
    (directory.path / "thesis.tex").write_text("")


@pytest.mark.parametrize(
    ("fill", "resume", "flags"),
    [
        (lambda directory: begun(directory).model.write_text("done"), "auto", {}),  # it ended without a checkpoint
        *((begun, "auto", {name: "other"}) for name in FIXED_FLAGS),  # other flags before the first checkpoint
        (lambda directory: begun(directory, 5), "never", {}),
        (lambda directory: begun(directory, 5), "CHECKPOINT", {}),  # even its own
        (somebody_else_s, "auto", {}),
    ],
)
def test_a_directory_that_is_neither_empty_nor_this_run_s_is_refused(fill, resume, flags, directory):
    fill(directory)
    with pytest.raises(InputError, match="must be empty or new"):
        origin(resume.replace("CHECKPOINT", paths(directory, 5)[0]), directory, FLAGS | flags)


def test_another_run_s_checkpoint(directory, tmp_path):
    begun(directory, 5, 10)
    new = RunDirectory(tmp_path / "new")
    assert origin(str(directory.path), new, FLAGS) == (paths(directory, 10, 5), False)
    assert origin(str(directory.checkpoints), new, FLAGS) == (paths(directory, 10, 5), False)
    assert origin(paths(directory, 5)[0], new, FLAGS) == (paths(directory, 5), False)


def test_flags_of_a_damaged_checkpoint_are_not_asked(directory):
    begun(directory, 5, 10)
    (directory.checkpoints / "step-000000010" / "manifest.json").write_text("{}")
    assert origin("auto", directory, FLAGS).checkpoints == paths(directory, 10, 5)


def test_when_all_are_damaged_the_run_does_not_begin_again(directory):
    begun(directory, 5)
    (directory.checkpoints / "step-000000005").rename(directory.checkpoints / "step-000000005.damaged")
    with pytest.raises(InputError, match="all checkpoints are damaged; the newest is step-000000005.damaged"):
        origin("auto", directory, FLAGS)


def test_a_run_may_have_a_name_like_a_checkpoint_s(tmp_path):
    directory = begun(RunDirectory(tmp_path / "step-decay"), 5)
    assert origin("auto", directory, FLAGS) == (paths(directory, 5), True)
    directory = begun(RunDirectory(tmp_path / "step-000000001"), 5)
    assert origin("auto", directory, FLAGS) == (paths(directory, 5), True)
    assert origin(str(directory.path), RunDirectory(tmp_path / "new"), FLAGS) == (paths(directory, 5), False)


@pytest.mark.parametrize("resume", ["never", "/another/run"])
def test_what_a_launcher_starts_again_goes_on(resume, directory):
    begun(directory, 5, job_name="20261123-101500")
    for another in ("", "20261123-111500"):  # another job, which may have been restarted, too
        with pytest.raises(InputError, match="must be empty or new"):
            origin(resume, directory, FLAGS, another)
    assert origin(resume, directory, FLAGS, "20261123-101500") == (paths(directory, 5), True)


def test_the_same_command_goes_on_with_what_it_began(directory, tmp_path):
    """From the other run's checkpoint until the run has its own, even if `--resume` is not repeated."""
    other = begun(RunDirectory(tmp_path / "other"), 7)
    [checkpoint] = paths(other, 7)
    directory.begin(f"{TEXT}--resume={other.path}\n", ["alpha"], step=7, checkpoint=checkpoint)
    assert origin(str(other.path), directory, FLAGS) == ([checkpoint], True)
    assert origin("auto", directory, FLAGS) == ([checkpoint], True)
    save(directory, 9)
    assert origin(str(other.path), directory, FLAGS) == (paths(directory, 9), True)


@pytest.mark.parametrize("killed_at", range(4))
def test_a_start_that_was_killed_did_not_lose_what_it_began_with(killed_at, directory, tmp_path, monkeypatch):
    """The same command, a launcher, and a command without `--resume` all resume from it, whichever files exist."""
    other = begun(RunDirectory(tmp_path / "other"), 7)
    path, [checkpoint] = str(other.path), paths(other, 7)
    replaced = []

    def replace(partial, path, replace=os.replace):
        if len(replaced) == killed_at:
            raise KeyboardInterrupt
        replaced.append(replace(partial, path))

    directory.make()
    with monkeypatch.context() as killing:
        killing.setattr(os, "replace", replace)
        try:
            directory.begin(
                f"{TEXT}--resume={path}\n", ["alpha"], step=7, checkpoint=checkpoint, facts={"job_name": "today"}
            )
        except KeyboardInterrupt:
            pass
    assert len(list(directory.path.glob("*.partial"))) == (killed_at < 3)
    assert origin(path, directory, FLAGS) == origin(path, directory, FLAGS, "today") == ([checkpoint], killed_at > 0)
    assert origin("auto", directory, FLAGS) == (([checkpoint], True) if killed_at else ([], False))
    if killed_at:  # otherwise no file was written, and "auto" and "never" begin at step 0
        with pytest.raises(InputError, match="must be empty or new"):
            origin("never", directory, FLAGS)
