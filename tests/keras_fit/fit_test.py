"""Keras's own `fit`, `evaluate` and `predict` on replicas give the results of plain Keras, in float64, including metrics."""

import functools
import pathlib
from typing import Any

import keras
import pytest

import tfdist
from tests.keras_fit.comparing import differences, plain_run
from tests.keras_fit.models import PROGRAMS, run
from tests.selection import quick
from tests.workers import running

pytestmark = pytest.mark.processes

plain = functools.cache(plain_run)


def our_run(name: str, strategy: tfdist.Strategy, **options: Any) -> dict[str, Any]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        program = PROGRAMS[name]()
    tfdist.distribute(program.model, strategy, **options)
    return run(program)


IN_ONE_PROCESS = ("several_inputs_and_outputs", "two_optimizers")


@pytest.mark.parametrize("name", quick(PROGRAMS, *IN_ONE_PROCESS))
def test_two_replicas_give_the_numbers_of_plain_keras(name: str, float64: None, mirrored2: tfdist.Strategy) -> None:
    assert not differences(our_run(name, mirrored2), plain(name))


@pytest.mark.parametrize("name", quick(["functional", "recurrent"], "functional"))
@pytest.mark.parametrize("strategy", quick(["single", "mirrored4"], "mirrored4"))
def test_so_do_one_and_four_replicas(name: str, strategy: str, float64: None, request: pytest.FixtureRequest) -> None:
    """With four replicas, the last batch of an epoch has fewer rows than replicas."""
    assert not differences(our_run(name, request.getfixturevalue(strategy)), plain(name))


ALL = list(PROGRAMS)


@pytest.mark.separable
@pytest.mark.parametrize(
    ("strategy", "size", "names"),
    [
        pytest.param("multiworker", 2, [*ALL[::4], "convolutional"], id="multiworker"),
        pytest.param("multiworker", 2, ALL, id="multiworker2-all", marks=pytest.mark.full),
        pytest.param("horovod", 2, ALL[::2], id="horovod2", marks=pytest.mark.full),
        pytest.param("horovod", 3, ALL[1::2], id="horovod3", marks=pytest.mark.full),
    ],
)
def test_so_do_processes(strategy: str, size: int, names: list[str], float64: None, tmp_path: pathlib.Path) -> None:
    """The processes' weights must also be bitwise equal. `make conformance` has all programs on each strategy."""
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    outcomes = running.outcomes("keras_fit", strategy, size, tmp_path, *names, seconds=400, environment=threads)
    assert [*outcomes[0]] == names
    assert not {name: found for name in names if (found := differences(outcomes[0][name], plain(name)))}
    first = [weight.tobytes() for name in names for weight in outcomes[0][name]["weights"]]
    for other in outcomes[1:]:
        assert [weight.tobytes() for name in names for weight in other[name]["weights"]] == first
