"""`tfdist train`, run repeatedly in one directory: the visible results of a resumed run."""

import errno
import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from tfdist import ledger, train
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints, lock
from tfdist.config.train_config import TrainConfig
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError
from tfdist.reporting import RunDirectory

pytestmark = pytest.mark.tensorflow  # imported when a command runs


def run(path: pathlib.Path, **flags) -> int:
    given = {"strategy": "single", "model": "mlp(hidden=(8,))", "dataset": "digits", "checkpoint_every": "10"}
    return train.main(TrainConfig(output_dir=str(path), **(given | flags)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    """A run of 50 steps, which ends in the middle of an epoch of 23 steps."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    run(path, steps=50)
    return path


def weights(path: pathlib.Path) -> dict[str, bytes]:
    saved = Checkpoint.open(complete_checkpoints(path / "checkpoints")[0])
    return {name: saved.read(name).tobytes() for name in saved.tensors}


def shown(path: pathlib.Path) -> list[tuple]:
    return [(r["kind"], r["step"], r["loss"], r["accuracy"]) for r in RunDirectory(path).records()]


def test_a_run_in_parts_is_the_whole(whole, tmp_path, capsys):
    """The same weights, the same records without duplicates, a valid ledger; a third start says that it is finished."""
    path = tmp_path / "parts"
    run(path, steps=30)
    for _ in range(2):
        run(path, steps=50)
    assert weights(path) == weights(whole)
    records = [record for record in shown(path) if record[1] != 30]  # the first part ended there, with an evaluation
    assert records == [record for record in shown(whole) if record[1] != 30]
    assert len(set(records)) == len(records)
    assert ledger.main(str(path)) == 0
    said = capsys.readouterr().out
    assert "Proved: 50 steps" in said
    assert (
        f"This run has finished at step 50. Its model is in {path / 'model.keras'}. To continue it, pass a larger"
        in said
    )
    starts = RunDirectory(path).read_starts()
    assert [start["step"] for start in starts] == [0, 30]
    assert json.loads((path / "finished.json").read_text())["step"] == 50


def test_what_was_recorded_before_a_checkpoint_is_on_the_disk_before_it(tmp_path, monkeypatch):
    """Such records are not repeated after a power failure, which loses what was not synchronized."""
    fsync, durable, seen = os.fsync, {"metrics.jsonl": 0}, {}

    def synchronize(descriptor):
        fsync(descriptor)
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name in ("metrics.jsonl", "start-0-rank-0.bin"):
            durable[path.name] = path.stat().st_size
        if path.name == "manifest.json":
            assert path.parent.name.startswith(".step-0000000")
            lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()[: durable["metrics.jsonl"]].splitlines()
            steps = [json.loads(line)["step"] for line in lines]
            seen[int(path.parent.name[-10:-8])] = steps, durable["start-0-rank-0.bin"]

    monkeypatch.setattr(os, "fsync", synchronize)
    run(tmp_path / "run", steps=20, log_every=5, eval_every=10, checkpoint_async=False)
    each = 8 * 64
    assert seen == {10: ([5, 10, 10], 10 * each + 2 * 24), 20: ([5, 10, 10, 15, 20, 20], 20 * each + 4 * 24)}


def test_what_is_launched_has_one_directory_though_another_size_has_another_strategy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDIST_LAUNCHED", "20261122-101500")
    train.main(TrainConfig(strategy="auto", model="mlp(hidden=(8,))", dataset="digits", steps=2))
    [path] = (tmp_path / "runs").iterdir()
    assert path.name == "digits-mlp-20261122-101500"
    assert RunDirectory(path).read_starts()[0]["job_name"] == "20261122-101500"


def test_a_lower_rate_is_used(tmp_path):
    run(tmp_path / "run", steps=10, optimizer="sgd", learning_rate=0.1)
    run(tmp_path / "run", steps=20, optimizer="sgd", learning_rate=0.0)
    first, second = complete_checkpoints(tmp_path / "run" / "checkpoints")[::-1]
    for name in Checkpoint.open(first).tensors:
        if name.startswith("model/"):
            np.testing.assert_array_equal(Checkpoint.open(first).read(name), Checkpoint.open(second).read(name))


def test_a_warm_up_may_follow_on_a_constant_rate(tmp_path):
    run(tmp_path / "run", steps=10)
    run(tmp_path / "run", steps=20, warmup_steps=5)
    run(tmp_path / "run", steps=30)


def test_a_tilde_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run(pathlib.Path("~/run"), steps=10)
    run(pathlib.Path("~/run"), steps=20)
    assert [start["step"] for start in RunDirectory(tmp_path / "run").read_starts()] == [0, 10]


def test_a_directory_in_use_is_refused(whole):
    with lock(whole), pytest.raises(InputError, match="Only one run at a time can write to a directory"):
        run(whole, steps=60)
    assert len((whole / "starts.jsonl").read_text().splitlines()) == 1


def test_other_checkpoints_are_left_alone(whole, tmp_path):
    """A run that begins from another run's damaged checkpoint uses the one before it, and does not rename any."""
    (tmp_path / "copy").mkdir()

    shutil.copytree(whole / "checkpoints", tmp_path / "copy" / "checkpoints")
    with open(tmp_path / "copy" / "checkpoints" / "step-000000050" / "manifest.json", "r+b") as file:
        file.truncate(10)
    run(tmp_path / "branch", steps=60, resume=str(tmp_path / "copy"))
    assert len(complete_checkpoints(tmp_path / "copy" / "checkpoints")) == 3
    [start] = [json.loads(line) for line in (tmp_path / "branch" / "starts.jsonl").read_text().splitlines()]
    assert (start["step"], start["checkpoint"]) == (40, str(tmp_path / "copy" / "checkpoints" / "step-000000040"))


@pytest.fixture
def not_shared(monkeypatch):
    """Simulates a second rank that does not see the first rank's directory."""
    gather = LocalGroup.gather

    def with_another(self, name, value, deadline=60.0):
        found = gather(self, name, value, deadline)
        return [*found, "none: No such file or directory"] if name == "output_dir/seen" else found

    monkeypatch.setattr(LocalGroup, "gather", with_another)


@pytest.mark.parametrize("flags", [{"checkpoint_every": "5"}, {"commit_every": 5, "commit_dir": "commits"}])
def test_checkpoints_need_a_directory_that_all_share(tmp_path, not_shared, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=r'Received: ".*/run", which is a different directory on rank 1. Pass another --output_dir'
    ):
        run(tmp_path / "run", steps=1, **({"checkpoint_every": "0"} | flags))


def test_without_checkpoints_a_directory_that_is_not_shared_is_a_warning(tmp_path, not_shared, caplog):
    """Such a run may succeed, but it cannot be saved on preemption."""
    assert run(tmp_path / "run", steps=1, checkpoint_every="0") == 0
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("This run cannot be saved on preemption")
    assert warning.endswith('/run", which is a different directory on rank 1. Pass another --output_dir.')


@pytest.fixture
def seen_by_two(monkeypatch):
    """Simulates a second rank that reads the same contents of `lock`; returns the list of what was read."""
    gather, seen = LocalGroup.gather, []

    def twice(self, name, value, deadline=60.0):
        found = gather(self, name, value, deadline)
        if name != "output_dir/seen":
            return found
        seen.extend(found)
        return found * 2

    monkeypatch.setattr(LocalGroup, "gather", twice)
    return seen


def limit_lock(monkeypatch, is_full) -> None:
    """Makes writes to the file `lock` fail as on a full disk while `is_full()`."""
    write = os.pwrite

    def pwrite(descriptor, *rest):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/lock") and is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, *rest)

    monkeypatch.setattr(os, "pwrite", pwrite)


def test_a_disk_that_a_partial_checkpoint_has_filled_ends_no_run(whole, tmp_path, seen_by_two, monkeypatch):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    partial = path / "checkpoints" / ".step-000000060.partial"
    partial.mkdir()
    limit_lock(monkeypatch, partial.exists)
    assert run(path, steps=51) == 0
    assert not partial.exists()
    assert seen_by_two[0].startswith(f"process {os.getpid()} on ")


def test_where_rank_0_cannot_write_nobody_knows_whether_all_share_it(tmp_path, seen_by_two, monkeypatch):
    """An earlier run may have left an empty file in the local directory of each host."""
    limit_lock(monkeypatch, lambda: True)
    with pytest.raises(
        InputError, match='/run", where rank 0 cannot write the file `lock`, by which .* shared directory. Pass'
    ):
        run(tmp_path / "run", steps=1)


@pytest.mark.parametrize("every", ["0", "5"])
def test_where_files_cannot_be_locked_the_run_is_warned_and_goes_on(every, tmp_path, seen_by_two, monkeypatch, caplog):
    """All processes still recognize the directory, and a second run gets a warning that names the first."""

    def refuse(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    path = tmp_path / "run"
    assert run(path, steps=5, checkpoint_every=every) == 0
    assert seen_by_two[0].startswith(f"process {os.getpid()} on ")
    (path / "lock").write_text("process 12 on alpha since noon\n")
    if every != "0":
        assert run(path, steps=6, checkpoint_every=every) == 0
    first, *second = [r.getMessage() for r in caplog.records if (r.name, r.levelname) == ("tfdist.cli.run", "WARNING")]
    assert (
        f"Received: {path}/lock: No locks available. Use another --output_dir. The run continues without a lock"
        in first
    )
    assert first.endswith("No other run is known.")
    last = ["The last run was process 12 on alpha since noon: make sure" in said for said in second]
    assert last == [True] * (every != "0")
