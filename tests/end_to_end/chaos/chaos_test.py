"""Runs that are killed and preempted at random end like uninterrupted ones: bitwise equal, with each example used once.

A few seeds with one interruption each; `make chaos` runs many, and longer ones. To repeat a seed:
`python -m tests.end_to_end.chaos --strategies=NAME --first=SEED --seeds=1`.
"""

import itertools
import math
import pathlib

import pytest

from tests.end_to_end.chaos import stale_updates
from tests.end_to_end.chaos.campaign import outcome, reference
from tests.end_to_end.chaos.settings import SETTINGS, START, STEP, WRITE, plan
from tfdist.checkpoint.format import Checkpoint, complete_checkpoints

pytestmark = pytest.mark.processes

SEEDS = {
    "multiworker2": (11,),  # SIGKILL in a step with commits on two hosts
    "horovod2": (38,),  # SIGTERM in a step under the launcher
    "mesh2x2": (41,),  # SIGTERM in a step
}
MORE_SEEDS = {
    "mesh1x4": (9,),  # SIGKILL in a write, with commits
    "multiworker2": (2,),  # SIGKILL at the start under the launcher
    "horovod2": (20,),  # SIGKILL in a write with commits on two hosts
    "horovod2_local": (11, 38),  # SIGKILL in a step with commits on two hosts; SIGTERM in a step under the launcher
    "multiworker2_local": (11,),  # SIGKILL in a step with commits on two hosts
    "multiworker2_diloco": (3,),  # SIGTERM in a step under the launcher
    "pipeline2_tensorflow": (11,),  # SIGKILL of the second stage in a step, with commits
    "pipeline2_horovod": (4,),  # SIGKILL in writes, under the launcher
    "servers3+2": (0,),  # SIGKILL of a worker, without which the run goes on, and of a server
    "horovod2_mpi": (16, 96),  # SIGKILL in a step with commits on two hosts; SIGTERM in a step under the launcher
}
STALE_SEEDS = (10, 11)  # SIGKILL of a worker and SIGSTOP of another; a pause of a server and SIGKILL of a worker


def check_parts(run: pathlib.Path) -> None:
    """Asserts that sharded slots are written without gathering them: one part per device, by the process that holds it."""
    tensors = Checkpoint.open(complete_checkpoints(run / "checkpoints")[0]).tensors
    slots = [tensor for name, tensor in tensors.items() if "momentum" in name or "velocity" in name]
    spread = [tensor.parts for tensor in slots if math.prod(tensor.shape) >= 64]
    assert len(spread) >= 2
    for parts in spread:
        assert len(parts) == 4
        assert len({math.prod(part.shape) for part in parts}) == 1
        assert len({part.file for part in parts}) == 2


@pytest.mark.parametrize("name", SEEDS)
def test_the_end_is_that_of_an_uninterrupted_run(name: str, tmp_path: pathlib.Path) -> None:
    check(name, SEEDS[name], tmp_path)


@pytest.mark.full
@pytest.mark.separable
@pytest.mark.parametrize("name", MORE_SEEDS)
def test_so_it_is_with_more_seeds(name: str, tmp_path: pathlib.Path) -> None:
    check(name, MORE_SEEDS[name], tmp_path)


@pytest.mark.full
@pytest.mark.separable
@pytest.mark.parametrize("seed", STALE_SEEDS)
def test_one_device_makes_the_updates_of_servers_again_whatever_is_lost(seed: int, tmp_path: pathlib.Path) -> None:
    made = stale_updates.outcome(seed, tmp_path)
    assert not made.problems, "\n".join(made.problems)


def check(name: str, seeds: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    """Compares runs that are interrupted as the seeds say with one that is not."""
    against = reference(SETTINGS[name], tmp_path)
    if name == "mesh2x2":
        check_parts(tmp_path / f"{name}-reference")
    outcomes = {seed: outcome(SETTINGS[name], seed, tmp_path, against) for seed in seeds}
    problems = [problem for made in outcomes.values() for problem in made.problems]
    assert not problems, "\n".join(problems)
    assert all(made.stopped for made in outcomes.values()), outcomes


@pytest.mark.parametrize("name", SETTINGS)
def test_a_hundred_seeds_have_every_kind_of_blow(name: str) -> None:
    size = SETTINGS[name].processes
    plans = [plan(name, seed, size) for seed in range(100)]
    blows = [blow for made in plans for blow in made.interruptions]
    phases = [blow.phase for blow in blows]
    assert phases.count(STEP) / len(blows) > 0.35
    assert phases.count(WRITE) / len(blows) > 0.35
    assert phases.count(START) / len(blows) > 0.15
    assert {blow.rank for blow in blows} == set(range(size))
    kinds = itertools.product((1, 2), (False, True), (False, True))
    assert {(len(made.interruptions), made.launched, made.commits) for made in plans} == set(kinds)
    assert len({(blow.signal, blow.phase) for blow in blows}) == 6
