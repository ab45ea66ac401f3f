"""A run whose rows are allocated by speed resumes with its allocation, also with one that has yet to begin."""

import shutil

import pytest

import tfdist
from tests.end_to_end.resume.exact_test import IMAGES, LABELS, make_trainer, tensors
from tests.selection import quick
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints
from tfdist.trainer.train_state import ReplicaSpeeds

STEPS = 30


def fit(trainer, directory):
    checkpoints = tfdist.Checkpoints(directory=str(directory), every="1", keep=100)
    schedule = tfdist.Schedule(log_every=10, steps_per_call=2)
    trainer.fit((IMAGES, LABELS), batch_size=8, steps=STEPS, schedule=schedule, checkpoints=checkpoints, verbose=0)


@pytest.fixture
def once(monkeypatch):
    """Makes the first decision another allocation, and all others the same one."""

    def propose(speeds):
        return None if len(speeds.allocations) > 1 else [6, 2]

    monkeypatch.setattr(ReplicaSpeeds, "propose", propose)


def steps_saved(directory):
    return {Checkpoint.open(path).step: path for path in complete_checkpoints(directory)}


@pytest.mark.parametrize("when", quick(["decided", "begun"], "decided"))
def test_every_bit_also_before_a_change(when, once, mirrored2, tmp_path):
    fit(make_trainer(mirrored2, balance="measured"), tmp_path / "whole")
    whole = steps_saved(tmp_path / "whole")
    [begins] = {allocation["step"] for allocation in Checkpoint.open(whole[STEPS]).values["speeds"]["deals"]} - {0}
    decided = min(step for step, path in whole.items() if len(Checkpoint.open(path).values["speeds"]["deals"]) > 1)
    assert decided < begins < STEPS
    for step in {"decided": [decided], "begun": [begins, begins + 1]}[when]:
        directory = tmp_path / str(step)
        shutil.copytree(whole[step], directory / whole[step].name)
        trainer = make_trainer(mirrored2, balance="measured")
        assert trainer.resume(directory) == step
        fit(trainer, directory)
        assert trainer.train_state.speeds.counts == [6, 2]
        assert tensors(complete_checkpoints(directory)[0]) == tensors(whole[STEPS]), step


@pytest.mark.full
def test_a_run_that_was_equal_can_be_measured_and_the_reverse(once, mirrored2, tmp_path):
    checkpoints = tfdist.Checkpoints(directory=str(tmp_path))
    for number, balance in enumerate(("equal", "measured", "equal", "weights(3,1)")):
        trainer = make_trainer(mirrored2, balance=balance)
        trainer.resume(tmp_path)
        steps = 40 * (number + 1)
        trainer.fit((IMAGES, LABELS), batch_size=8, steps=steps, verbose=0, checkpoints=checkpoints)
        assert (trainer.train_state.speeds is None) == (balance != "measured")
