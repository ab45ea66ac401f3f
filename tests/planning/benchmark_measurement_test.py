"""What was measured: medians, bandwidths, records, and rows of the table."""

import json

import pytest

from tfdist.planning import benchmark_results
from tfdist.planning.benchmark_results import TRAFFIC, Measurement


def measured(operation="all_reduce", size=8 * 10**9, replicas=4, seconds=(3.0, 1.0, 2.0)):
    return Measurement(operation, size, "float32", "mirrored", replicas, 1, tuple(seconds))


def test_times_and_bandwidths_are_of_the_median():
    one = measured()
    assert one.median == 2.0
    assert one.algorithm_bandwidth == 4e9
    assert one.bus_bandwidth == pytest.approx(4e9 * 2 * 3 / 4)


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("all_to_all", 0.75),
        ("reduce_scatter", 0.75),
        ("broadcast", 1.0),
        ("barrier", 0.0),
    ],
)
def test_the_factors_of_the_nccl_tests(operation, factor):
    assert TRAFFIC[operation](4) == factor
    assert measured(operation).bus_bandwidth == pytest.approx(4e9 * factor)


def test_a_record_is_json_with_all_that_was_measured():
    record = json.loads(json.dumps(measured().record()))
    assert record == {
        "schema": 2,
        "operation": "all_reduce",
        "bytes": 8 * 10**9,
        "dtype": "float32",
        "strategy": "mirrored",
        "replicas": 4,
        "calls": 1,
        "algorithm": "engine",
        "seconds": [3.0, 1.0, 2.0],
        "seconds_median": 2.0,
        "seconds_min": 1.0,
        "algorithm_bytes_per_second": 4e9,
        "bus_bytes_per_second": 6e9,
    }


def line(operation, size, *seconds):
    return benchmark_results.row(Measurement(operation, size, "float32", "mirrored", 2, 10, seconds))


def test_a_row_stands_under_its_header():
    header, row = benchmark_results.header(), line("all_reduce", 4 * 2**20, 0.004, 0.002, 0.008)
    assert header == "operation              size   median ms      min ms  algorithm GB/s    bus GB/s"
    assert row == "all_reduce          4.0 MiB      4.0000      2.0000          1.0486      1.0486"
