"""What was measured: medians, bandwidths, records, and rows of the table."""

import dataclasses
import io
import json

import pytest

from tfdist.planning import benchmark_results
from tfdist.planning.benchmark_results import TRAFFIC, Measurement, draw


def measured(operation="all_reduce", size=8 * 10**9, replicas=4, seconds=(3.0, 1.0, 2.0)):
    return Measurement(operation, size, "float32", "mirrored", replicas, 1, tuple(seconds))


def test_the_factors_of_the_nccl_tests():
    parts = dict.fromkeys(("all_gather", "all_to_all", "reduce_scatter"), 0.75)
    factors = {"all_reduce": 1.5, "broadcast": 1.0, "barrier": 0.0} | parts
    assert {operation: TRAFFIC[operation](4) for operation in TRAFFIC} == factors
    assert {name: measured(name).bus_bandwidth / 4e9 for name in TRAFFIC} == pytest.approx(factors)


def test_a_record_is_json_with_all_that_was_measured_and_the_bandwidths_of_the_median():
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


def test_a_row_stands_under_its_header():
    header = benchmark_results.header()
    row = benchmark_results.row(measured(size=4 * 2**20, replicas=2, seconds=(0.004, 0.002, 0.008)))
    assert header == "operation              size   median ms      min ms  algorithm GB/s    bus GB/s"
    assert row == "all_reduce          4.0 MiB      4.0000      2.0000          1.0486      1.0486"


SIZES = (4, 1024, 2**20)


def point(operation, size, seconds):
    return Measurement(operation, size, "float32", "horovod", 2, 1, (seconds, 2 * seconds, 3 * seconds))


def test_each_operation_is_a_line_in_both_panels():
    points = [point(name, size, 1e-3 + size * 1e-9) for name in list(TRAFFIC)[:-1] for size in SIZES]
    figure = draw([*points, point("barrier", 0, 1e-4)])
    left, right = figure.axes
    assert figure.get_suptitle() == "horovod, 2 replicas, float32"
    assert [text.get_text() for text in left.get_legend().get_texts()] == list(TRAFFIC)
    assert len(left.lines) == len(TRAFFIC)
    assert len(right.lines) == len(TRAFFIC) - 1, "a barrier has no bandwidth"
    assert list(left.lines[0].get_xdata()) == list(SIZES)
    assert left.lines[0].get_ydata()[0] == 2 * (1e-3 + 4e-9) * 1e3, "the median, in milliseconds"
    assert right.lines[0].get_ydata()[2] == points[2].bus_bandwidth / 1e9
    assert (left.get_xlabel(), left.get_yscale(), right.get_ylabel()) == ("bytes", "log", "GB/s (median)")
    assert [text.get_text() for text in left.get_xticklabels()] == ["4", "64", "1K", "16K", "256K"]


def test_each_algorithm_is_a_line():
    figure = draw(
        [
            dataclasses.replace(point("all_reduce", size, 1e-3), algorithm=name)
            for name in ("engine", "ring")
            for size in SIZES
        ]
    )
    left, right = figure.axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["engine", "ring"]
    assert left.get_title(loc="left") == "Time of an all-reduce"
    assert len(right.lines) == 2


def test_a_barrier_alone_and_a_size_alone_are_drawn():
    for points in ([point("barrier", 0, 1e-4)], [point("broadcast", 64, 1e-3)]):
        file = io.BytesIO()
        draw(points).savefig(file, format="png")
        assert file.getvalue().startswith(b"\x89PNG")
