"""Exchanges of weights with real processes, in float64: against summed gradients, and against devices of one process."""

import functools
import tempfile

import numpy as np
import pytest

import tfdist
from tests.selection import quick
from tests.workers import local_sgd, running

pytestmark = pytest.mark.processes

EVERY_STEP = "every_step"
EQUAL = (
    "local_sgd(period=1)",
    "post_local_sgd(warmup_steps=4, period=1)",
    "diloco(period=1, outer='sgd(learning_rate=1.0)')",
)
OTHERS = (
    "local_sgd(period=3)",
    "local_sgd(period=3, state=averaged)",
    "diloco(period=3)",
    "easgd(period=3)",
)
JOBS = (("horovod", 3), pytest.param("multiworker", 3, marks=pytest.mark.full))


@functools.cache
def outcomes(strategy: str, size: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as directory:
        return running.outcomes("local_sgd", strategy, size, directory, EVERY_STEP, *EQUAL, *OTHERS, seconds=400)


def check_close(one: dict, other: dict) -> None:
    """Asserts that weights, losses and metrics are equal up to rounding."""
    for found, wanted in zip(one["weights"], other["weights"], strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-9 * np.linalg.norm(wanted)
    np.testing.assert_allclose(one["losses"], other["losses"], rtol=1e-9)
    assert one["evaluation"] == pytest.approx(other["evaluation"], rel=1e-9)


@pytest.mark.parametrize(("strategy", "size"), JOBS)
@pytest.mark.parametrize("sync", [*EQUAL, *OTHERS])
def test_ranks_agree(strategy: str, size: int, sync: str) -> None:
    first, *others = [rank[sync] for rank in outcomes(strategy, size)]
    for other in others:
        assert all((a == b).all() for a, b in zip(first["weights"], other["weights"], strict=True))
        assert (first["losses"], first["evaluation"]) == (other["losses"], other["evaluation"])


@pytest.mark.parametrize(("strategy", "size"), JOBS)
@pytest.mark.parametrize("sync", EQUAL)
def test_an_exchange_after_every_step_equals_summed_gradients(strategy: str, size: int, sync: str) -> None:
    [first, *_] = outcomes(strategy, size)
    check_close(first[sync], first[EVERY_STEP])


@pytest.mark.parametrize(("strategy", "size"), JOBS)
@pytest.mark.parametrize("sync", quick(OTHERS, "local_sgd(period=3)", "diloco(period=3)", "easgd(period=3)"))
def test_processes_equal_devices(strategy: str, size: int, sync: str, float64: None) -> None:
    [first, *_] = outcomes(strategy, size)
    check_close(first[sync], local_sgd.train(tfdist.load_strategy("mirrored", devices=size), sync))
    with pytest.raises(AssertionError):
        check_close(first[sync], first[EVERY_STEP])
