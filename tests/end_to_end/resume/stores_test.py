"""Durable and in-memory checkpoints of a run: when they are written, what happens on failure, and which one is resumed."""

import errno
import functools
import logging
import os
import shutil
import signal

import pytest

import tfdist
from tests.end_to_end.resume.exact_test import FEEDBACK, IMAGES, LABELS, STEPS, make_trainer, small_model, tensors
from tests.end_to_end.resume.saving_test import At, heard, steps_of
from tfdist.checkpoint.format import Checkpoint, atomic_write, complete_checkpoints
from tfdist.checkpoint.run_variables import RunVariables
from tfdist.errors import InputError, Preempted

small = functools.partial(make_trainer, make=small_model)


def fit(trainer, path, steps=STEPS, callbacks=(), **options):
    options = {"every": "5", "commit_every": 3, "in_background": False} | options
    saved = tfdist.Checkpoints(directory=str(path / "disk"), commit_directory=str(path / "memory"), **options)
    return trainer.fit(
        (IMAGES, LABELS),
        batch_size=8,
        steps=steps,
        schedule=tfdist.Schedule(steps_per_call=4),
        checkpoints=saved,
        callbacks=callbacks,
    )


def test_both_kinds_are_made_and_commits_go_when_the_end_is_saved(single, tmp_path):
    seen = []
    look = At(11, lambda: seen.extend((steps_of(tmp_path / "disk"), steps_of(tmp_path / "memory"))))
    fit(small(single), tmp_path, callbacks=[look])
    assert seen == [[10, 5], [9, 6]]
    assert (steps_of(tmp_path / "disk"), steps_of(tmp_path / "memory")) == ([12, 10, 5], [])


def test_a_commit_has_the_bits_of_a_checkpoint_and_both_are_copied_once(mirrored2, tmp_path, monkeypatch):
    copies = []
    parts = RunVariables.parts
    monkeypatch.setattr(RunVariables, "parts", lambda state, *given: copies.append(state) or parts(state, *given))
    saved = [tmp_path / "copy-10", tmp_path / "copy-5"]
    look = At(
        11,
        lambda: [shutil.copytree(*each) for each in zip(complete_checkpoints(tmp_path / "memory"), saved, strict=True)],
    )
    fit(make_trainer(mirrored2, **FEEDBACK), tmp_path, 11, [look], commit_every=5)
    assert len(copies) == 3  # of steps 5, 10 and 11
    assert complete_checkpoints(tmp_path / "memory") == []
    monkeypatch.undo()
    other = tmp_path / "other"
    fit(make_trainer(mirrored2, **FEEDBACK), other, 11, every="0", commit_every=5)
    assert (steps_of(tmp_path / "disk"), steps_of(other / "memory")) == ([11, 10, 5], [10, 5])
    assert tensors(complete_checkpoints(other / "memory")[0]) == tensors(complete_checkpoints(tmp_path / "disk")[1])


def test_what_cannot_be_written_is_one_warning_and_harms_none_before(single, tmp_path, monkeypatch, caplog):
    write, full = atomic_write.write_shard, []

    def limited(directory, rank, parts):
        if full and "memory" in str(directory):
            raise OSError(errno.ENOSPC, "No space left on device", str(directory))
        return write(directory, rank, parts)

    monkeypatch.setattr(atomic_write, "write_shard", limited)
    with caplog.at_level(logging.WARNING):
        fit(small(single), tmp_path, 10, [At(3, lambda: full.append(1))], every="0", commit_every=1)
    assert steps_of(tmp_path / "memory") == [2, 1]
    for path in complete_checkpoints(tmp_path / "memory"):
        Checkpoint.open(path).verify()
    [warning] = [record.getMessage() for record in caplog.records if "in-memory checkpoint" in record.getMessage()]
    assert (
        "part of the in-memory checkpoint. Received, for step-000000003: rank 0: [Errno 28] No space left on device"
        in warning
    )
    assert warning.endswith("The run continues, and tries again at the next in-memory checkpoint.")
    full.clear()
    trainer = small(single)
    assert trainer.resume(tmp_path / "disk", tmp_path / "memory") == 2
    fit(trainer, tmp_path, 10, every="0", commit_every=1)
    assert steps_of(tmp_path / "memory") == [10, 9]


def test_a_run_that_is_preempted_has_a_checkpoint_and_keeps_its_commits(single, tmp_path, monkeypatch):
    stop = At(4, heard(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(Preempted, match="saved at step .*disk"):
        fit(small(single), tmp_path, 100, [stop], every="0")
    [stopped], kept = steps_of(tmp_path / "disk"), steps_of(tmp_path / "memory")
    assert kept and kept[0] <= stopped
    trainer = small(single)
    assert trainer.resume(tmp_path / "disk", tmp_path / "memory") == stopped


def test_commits_of_another_run_are_in_the_way(single, tmp_path):
    fit(small(single), tmp_path, every="0")
    with pytest.raises(InputError, match="needs a checkpoint directory without checkpoints of later steps. .*memory"):
        fit(small(single), tmp_path, every="0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"commit_every": 3},
            r"specify both commit_every \(at least 1\) and commit_directory, or neither. Received: commit_every=3",
        ),
        ({"commit_directory": "b"}, "Received: commit_every=0, commit_directory='b'"),
        ({"commit_every": -1, "commit_directory": "b"}, "Received: commit_every=-1"),
        ({"commit_every": 3, "commit_directory": "a/"}, "are removed independently. Received for both: a."),
    ],
)
def test_what_is_no_place_for_commits(options, message):
    with pytest.raises(InputError, match=message):
        tfdist.Checkpoints(directory="a", **options)
