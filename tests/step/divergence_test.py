"""When a training loss counts as diverging."""

import dataclasses
import json

import pytest

from tfdist.step.running_metrics import FACTOR, STEPS, Divergence


def reported(losses, batch_size=64, divergence=None):
    """Returns the numbers of the steps at which a divergence is reported."""
    divergence = divergence or Divergence()
    return [step for step, loss in enumerate(losses) if divergence.add([loss], batch_size) is not None]


def test_a_loss_that_stays_far_above_the_initial_one_is_reported_once():
    assert reported([2.3, *[2.3 * FACTOR * 1.01] * 40]) == [STEPS]


@pytest.mark.parametrize(
    "losses",
    [
        [2.3, *[2.3 * FACTOR] * 40],
        [2.3, 1e6, *[100.0] * (STEPS - 2), 2.0, *[100.0] * (STEPS - 1)],  # it comes back
        [2.3, *[1e9, 0.1] * 40],  # single batches
        [0.0, *[5.0] * 40],
        [-1.0, *[5.0] * 40],
    ],
)
def test_other_losses_are_not_reported(losses):
    assert reported(losses) == []


def test_the_initial_loss_is_that_of_some_examples():
    """Single examples may happen to be fitted at first."""
    assert reported([1e-6, *[1.0] * 100], batch_size=1) == []
    assert reported([1e-6, *[1.0] * 100], batch_size=32) == [STEPS]


def test_a_resumed_run_reports_at_the_same_step():
    losses = [2.3, *[2.0] * 5, *[50.0] * 30]
    divergence = Divergence()
    assert reported(losses[:10], divergence=divergence) == []
    resumed = Divergence(**json.loads(json.dumps(dataclasses.asdict(divergence))))
    assert [step + 10 for step in reported(losses[10:], divergence=resumed)] == reported(losses)
