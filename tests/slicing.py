"""Divides the tests of `make conformance` into slices that take about as long: --slice=3/36 selects the third of 36.

    python -m tests.slicing

prints the seconds that each unit took in the last runs of `make conformance`, for `SECONDS`.

A unit is never divided: the tests of a file, which may share jobs and fixtures, or one test that is marked as `separable`. A
slice has whole units, so that what their tests share is computed in one slice, and by one process of pytest, only.
"""

import collections
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence

import pytest

REPORTS = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "conformance"
_HERE = pathlib.Path(__file__).parent

# Seconds of units, measured with two at a time on two cores: of a separable test, or of all tests of a file. Only their
# ratios matter. What takes as long as most has no line.
SECONDS: dict[str, float] = {
    "conformance/compression_test.py": 45,
    "conformance/conformance_test.py::test_layouts_of_activations": 13,
    "conformance/conformance_test.py::test_logical_devices": 5,
    "conformance/conformance_test.py::test_product_of_hybrid_sharding": 13,
    "conformance/conformance_test.py::test_product_of_layouts_of_activations": 13,
    "conformance/conformance_test.py::test_product_on_a_mesh_in_float32": 8,
    "conformance/conformance_test.py::test_product_on_a_mesh_over_processes": 70,
    "conformance/conformance_test.py::test_product_on_logical_devices": 5,
    "conformance/conformance_test.py::test_product_on_logical_devices_in_float32": 5,
    "conformance/conformance_test.py::test_product_on_meshes": 8,
    "conformance/conformance_test.py::test_product_on_processes": 55,
    "conformance/conformance_test.py::test_slow_cases_on_logical_devices": 150,
    "conformance/local_sgd_test.py": 60,
    "conformance/mesh_operations_test.py": 180,
    "conformance/uneven_test.py": 40,
    "collectives/algorithms/processes_test.py": 60,
    "distribution/sharded_optimizer_test.py": 80,
    "documents/pages_test.py::test_what_a_page_shows_is_what_happens": 45,
    "end_to_end/chaos/chaos_test.py::test_so_it_is_with_more_seeds": 35,
    "end_to_end/elastic/horovodrun_test.py": 40,
    "end_to_end/elastic/run_test.py": 140,
    "end_to_end/exit_codes_test.py": 60,
    "end_to_end/help_examples_test.py": 250,
    "end_to_end/resume/commits_process_test.py": 110,
    "end_to_end/resume/cross_strategy_test.py::test_every_strategy_goes_on_from_every_other": 120,
    "end_to_end/resume/elastic_batch_test.py": 60,
    "end_to_end/resume/exact_test.py": 70,
    "finders/function_trials_test.py": 50,
    "gradients/accumulation_test.py": 150,
    "horovod/examples_test.py": 130,
    "horovod/operations_test.py": 75,
    "horovod/mpi_test.py": 30,
    "keras_fit/empty_replica_test.py": 80,
    "keras_fit/fit_test.py": 60,
    "keras_fit/fit_test.py::test_so_do_processes": 100,
    "keras_fit/keras_features_test.py": 50,
    "launcher/sockets_test.py": 50,
    "layers/recompute_test.py": 50,
    "programs/programs_test.py::test_as_written_its_losses_have_the_distribution_of_one_device": 55,
    "programs/programs_test.py::test_it_does_the_same_on_every_strategy": 30,
    "step/step_test.py": 50,
    "strategies/mesh_collectives_test.py": 120,
    "strategies/pipeline_delayed_test.py": 150,
    "strategies/pipeline_test.py": 40,
    "strategies/pipeline_test.py::test_product": 70,
    "strategies/spread_pipeline_test.py": 200,
    "synchronization/streaming_processes_test.py": 45,
    "trainer/programs_test.py::test_only_fit_is_replaced": 25,
    "trainer/schedules_test.py": 60,
    "traps/horovod_test.py": 90,
}
_SECONDS = 15.0


def units_of(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Returns the tests by unit, in order."""
    units: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        units[unit_of(item)].append(item)
    return dict(units)


def unit_of(item: pytest.Item) -> str:
    """Returns the name of a test's unit: that of the test, or of its file."""
    return item.nodeid if is_separable(item) else item.path.relative_to(_HERE).as_posix()


def is_separable(item: pytest.Item) -> bool:
    """Returns whether each parameter of a test is a unit."""
    return item.get_closest_marker("separable") is not None


def seconds_of(unit: str) -> float:
    """Returns how long a unit takes, about."""
    return SECONDS.get(unit, SECONDS.get(_name(unit), _SECONDS))


def _name(unit: str) -> str:
    """Returns a unit's key in `SECONDS`: for a separable test, its file and function."""
    return unit.partition("[")[0].removeprefix("tests/")


def select(items: Sequence[pytest.Item], number: int, parts: int) -> list[pytest.Item]:
    """Returns the tests of the slice `number`, from 1; what takes longest comes first."""
    units = units_of(items)
    totals = [0.0] * parts
    chosen = []
    for unit in sorted(units, key=lambda unit: -seconds_of(unit)):
        place = totals.index(min(totals))
        totals[place] += seconds_of(unit)
        if place == number - 1:
            chosen += units[unit]
    return chosen


def measured(reports: Iterable[pathlib.Path]) -> dict[str, tuple[int, float]]:
    """Returns, by function and by file, how many tests the reports of pytest's --junit-xml have, and their mean seconds."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for path in reports:
        for case in ElementTree.parse(path).iter("testcase"):
            file = case.attrib["classname"].replace(".", "/").removeprefix("tests/") + ".py"
            function = re.split(r"[\[@]", case.attrib["name"])[0]  # xdist appends the group
            for key in (file, f"{file}::{function}"):
                found[key].append(float(case.attrib["time"]))
    return {key: (len(times), sum(times) / len(times)) for key, times in found.items()}


if __name__ == "__main__":
    for key, (count, mean) in sorted(
        measured(REPORTS.glob("*.xml")).items(), key=lambda item: -item[1][0] * item[1][1]
    ):
        print(f"{count * mean:7.0f} s  {count:4} x {mean:5.1f} s  {key}")
