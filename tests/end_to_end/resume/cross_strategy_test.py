"""Runs saved under one strategy and resumed under any other: loaded bit for bit, with equal weights after further steps."""

import dataclasses
import pathlib
from contextlib import ExitStack

import pytest

import tfdist
from tests import processes
from tests.workers import resume, running
from tfdist import testing

pytestmark = [pytest.mark.processes, pytest.mark.separable]

TOLERANCE = 1e-9  # in float64


def in_process(fixture: str, case: str, request: pytest.FixtureRequest) -> tfdist.Strategy:
    """Returns a fixture's strategy; for convolutions, whose kernels are replicated, a mesh with sharded slots."""
    if case == "cnn" and fixture.startswith("mesh"):
        shape, _ = testing.MESHES[fixture.removeprefix("mesh")]
        return tfdist.load_strategy("mesh", mesh_shape=shape, shard="optimizer", shard_min_elements=1, environment={})
    return request.getfixturevalue(fixture)


@pytest.mark.parametrize(
    ("case", "jobs", "fixtures"),
    [
        ("mlp", ["multiworker2", "horovod3"], ["single", "mirrored2", "2x2", "1x4"]),
        ("mlp", ["pipeline2", "pipeline3", "parameter_server2"], ["single", "mirrored2"]),
        *(
            pytest.param(case, [*resume.JOBS], [*resume.IN_PROCESS], marks=pytest.mark.full, id=f"{case}-all")
            for case in resume.CASES
        ),
    ],
)
def test_every_strategy_goes_on_from_every_other(
    case: str,
    jobs: list[str],
    fixtures: list[str],
    float64: None,
    tmp_path: pathlib.Path,
    request: pytest.FixtureRequest,
) -> None:
    """All pairs of strategies for saving and loading; `resume.go_on` compares the loaded bits."""
    strategies = {name: in_process(resume.IN_PROCESS[name], case, request) for name in fixtures}
    savers = [*strategies, *jobs]
    outcomes = {name: tmp_path / f"outcomes of {name}" for name in jobs}
    with ExitStack() as stack:
        started = {}
        for name in jobs:
            outcomes[name].mkdir()
            strategy = name.rstrip("0123456789") + resume.OPTIONS.get(name, "")
            arguments = ("resume", strategy, outcomes[name], name, case, str(tmp_path), *savers)
            job = processes.job(running.command(*arguments), resume.JOBS[name], processes.ONE_THREAD)
            started[name] = stack.enter_context(job)
        trainers = {name: resume.save(strategies[name], case, tmp_path / name) for name in strategies}
        for name, job in started.items():
            ends = job.wait(300)
            assert [end.code for end in ends] == [0] * resume.JOBS[name], "\n".join(end.output for end in ends)
    ended = {
        name: {saver: resume.go_on(trainer, case, tmp_path / saver) for saver in savers}
        for name, trainer in trainers.items()
    }
    for name in jobs:
        ranks = running.read(outcomes[name], resume.JOBS[name])
        ended[name] = {saver: {k: v for rank in ranks for k, v in rank[saver].items()} for saver in savers}
        for saver in savers:
            for rank in ranks:
                assert {k: v.tobytes() for k, v in rank[saver].items()} == {
                    k: ended[name][saver][k].tobytes() for k in rank[saver]
                }
        if "pipeline" not in name:
            assert all(rank[saver].keys() == ranks[0][saver].keys() for rank in ranks for saver in savers)
    uninterrupted = testing.run_case(
        strategies["single"], dataclasses.replace(resume.CASES[case], steps=resume.END)
    ).variables
    model = resume.CASES[case].model
    far = [
        (saver, loader, difference)
        for loader, outcomes in ended.items()
        for saver, found in outcomes.items()
        for difference in testing.compare(found, uninterrupted, model)
        if not difference.noise and difference.relative > TOLERANCE
    ]
    assert not far, far[:5]
    same = ended["single"]["single"]
    assert all(same[path].tobytes() == value.tobytes() for path, value in uninterrupted.items()), "not bit for bit"
