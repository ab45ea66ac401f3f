"""Programs as written and started by users, on real processes: their results equal those of one device.

A selection here, and the product of all programs and strategies in `make conformance`; `python -m tests.programs table` writes
docs/reference/programs.md.
"""

import functools

import pytest

from tests.programs import distribution, running
from tests.programs.catalog import programs

pytestmark = pytest.mark.processes

PROGRAMS = programs()
# One of each kind: a file that the chief writes, a loss in a layer, data of unknown length, a custom step. A script that
# creates its own strategy is run by tests/repository/examples_test.py.
COVER = (
    ("timeseries/timeseries_classification.py", "multiworker"),
    ("guides/endpoint_layer.py", "mirrored"),
    ("tabular/csv_from_generator.py", "horovod"),
    ("recommendation/two_tower_retrieval.py", "multiworker"),
)


@functools.cache
def verdicts(path: str, strategy: str) -> dict[str, str]:
    return running.verdicts(PROGRAMS[path], [strategy])


@pytest.mark.parametrize(("path", "strategy"), COVER)
def test_a_program(path: str, strategy: str) -> None:
    assert {strategy: found for strategy, found in verdicts(path, strategy).items() if not running.is_good(found)} == {}


@pytest.mark.full
@pytest.mark.parametrize("path", PROGRAMS)
def test_it_does_the_same_on_every_strategy(path: str) -> None:
    found = running.verdicts(PROGRAMS[path], ["mirrored", "multiworker", "horovod"])
    assert {strategy: verdict for strategy, verdict in found.items() if not running.is_good(verdict)} == {}


# Each program on one of the three strategies; `python -m tests.programs distribution` runs the product.
AS_WRITTEN = [
    (path, ("mirrored", "multiworker", "horovod")[place % 3])
    for place, path in enumerate(path for path, program in PROGRAMS.items() if distribution.applies(program))
]


@pytest.mark.full
@pytest.mark.parametrize(("path", "strategy"), AS_WRITTEN)
def test_as_written_its_losses_have_the_distribution_of_one_device(path: str, strategy: str) -> None:
    found = distribution.verdicts(PROGRAMS[path], [strategy])
    assert {name: verdict for name, verdict in found.items() if not running.is_good(verdict)} == {}


def test_every_program_that_is_named_is_there() -> None:
    assert {path for path, _ in COVER} <= set(PROGRAMS)
    assert len(PROGRAMS) >= 40
