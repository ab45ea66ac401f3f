"""Programs as written and started by users, on real processes: their results equal those of one device.

A selection here, and all programs on all strategies in `make conformance`; `python -m tests.programs table` writes
docs/reference/programs.md.
"""

import itertools
from collections.abc import Mapping

import pytest

from tests.programs import distribution, running
from tests.programs.catalog import programs

pytestmark = pytest.mark.processes

PROGRAMS = programs()
# One of each kind: a file that the chief writes, a loss in a layer, data of unknown length, a custom step. A script that
# creates its own strategy is run by tests/repository/examples_test.py.
COVER = (
    ("tabular/imbalanced_classification.py", "multiworker"),
    ("guides/endpoint_layer.py", "mirrored"),
    ("tabular/csv_from_generator.py", "horovod"),
    ("recommendation/two_tower_retrieval.py", "multiworker"),
)


def bad(found: Mapping[str, str]) -> dict[str, str]:
    """Returns the verdicts, by strategy, that are not as expected."""
    return {strategy: verdict for strategy, verdict in found.items() if not running.is_good(verdict)}


@pytest.mark.parametrize(("path", "strategy"), COVER)
def test_a_program(path: str, strategy: str) -> None:
    assert bad(running.verdicts(PROGRAMS[path], [strategy])) == {}


# A program with randomness of its own runs on one of the strategies as it is, over several seeds, and on the others without
# randomness, where its numbers equal those of one device. `python -m tests.programs [distribution]` runs the whole product.
STRATEGIES = ("mirrored", "multiworker", "horovod")
AS_WRITTEN = {
    path: STRATEGIES[place % 3]
    for place, path in enumerate(path for path, program in PROGRAMS.items() if distribution.applies(program))
}
EQUAL = {
    path: [
        strategy for strategy in STRATEGIES if strategy != AS_WRITTEN.get(path) or not distribution.compares(program)
    ]
    for path, program in PROGRAMS.items()
}


@pytest.mark.full
@pytest.mark.separable
@pytest.mark.parametrize("path", EQUAL)
def test_it_does_the_same_on_every_strategy(path: str) -> None:
    assert bad(running.verdicts(PROGRAMS[path], EQUAL[path])) == {}


@pytest.mark.full
@pytest.mark.separable
@pytest.mark.parametrize(("path", "strategy"), AS_WRITTEN.items())
def test_as_written_its_losses_have_the_distribution_of_one_device(path: str, strategy: str) -> None:
    assert bad(distribution.verdicts(PROGRAMS[path], [strategy])) == {}


def test_every_program_is_run_on_every_strategy() -> None:
    run = {(path, strategy) for path, strategies in EQUAL.items() for strategy in strategies} | {*AS_WRITTEN.items()}
    assert run == {*itertools.product(PROGRAMS, STRATEGIES)}
    assert all(PROGRAMS[path].own_strategy in ("", *EQUAL[path]) for path in PROGRAMS)
    assert len(AS_WRITTEN) >= 18


def test_every_program_that_is_named_is_there() -> None:
    assert {path for path, _ in COVER} <= set(PROGRAMS)
    assert len(PROGRAMS) >= 36
