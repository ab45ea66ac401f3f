from tfdist.benchmark import table
from tfdist.benchmark.measurement import Measured


def line(operation, size, *seconds):
    return table.row(Measured(operation, size, "float32", "mirrored", 2, 10, seconds))


def test_a_row_stands_under_its_header():
    header, row = table.header(), line("all_reduce", 4 * 2**20, 0.004, 0.002, 0.008)
    assert header == "operation              size   median ms      min ms  algorithm GB/s    bus GB/s"
    assert row == "all_reduce          4.0 MiB      4.0000      2.0000          1.0486      1.0486"


def test_the_columns_hold_the_extremes():
    rows = [
        line("reduce_scatter", 64 * 2**20, 12.5),
        line("all_gather", 8, 1e-6),
        line("barrier", 0, 0.0001),
    ]
    assert {len(row) for row in rows} == {len(table.header())}
    assert rows[2].split() == ["barrier", "-", "0.1000", "0.1000", "-", "-"]
