import dataclasses
import io

from tfdist.benchmark.measurement import TRAFFIC, Measured
from tfdist.benchmark.plot import draw

SIZES = (4, 1024, 2**20)


def measured(operation, size, seconds):
    return Measured(operation, size, "float32", "horovod", 2, 1, (seconds, 2 * seconds, 3 * seconds))


def test_each_operation_is_a_line_in_both_panels():
    points = [measured(name, size, 1e-3 + size * 1e-9) for name in list(TRAFFIC)[:-1] for size in SIZES]
    figure = draw([*points, measured("barrier", 0, 1e-4)])
    left, right = figure.axes
    assert figure.get_suptitle() == "horovod, 2 replicas, float32"
    assert [text.get_text() for text in left.get_legend().get_texts()] == list(TRAFFIC)
    assert len(left.lines) == len(TRAFFIC)
    assert len(right.lines) == len(TRAFFIC) - 1, "a barrier has no bandwidth"
    assert list(left.lines[0].get_xdata()) == list(SIZES)
    assert left.lines[0].get_ydata()[0] == 2 * (1e-3 + 4e-9) * 1e3, "the median, in milliseconds"
    assert right.lines[0].get_ydata()[2] == points[2].bus_bandwidth / 1e9
    assert (left.get_xlabel(), left.get_yscale(), right.get_ylabel()) == ("bytes", "log", "GB/s, by the median")
    assert [text.get_text() for text in left.get_xticklabels()] == ["4", "64", "1K", "16K", "256K"]


def test_each_algorithm_is_a_line():
    figure = draw(
        [
            dataclasses.replace(measured("all_reduce", size, 1e-3), algorithm=name)
            for name in ("engine", "ring")
            for size in SIZES
        ]
    )
    left, right = figure.axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["engine", "ring"]
    assert left.get_title(loc="left") == "Time of an all-reduce"
    assert len(right.lines) == 2


def test_a_barrier_alone_and_a_size_alone_are_drawn():
    for points in ([measured("barrier", 0, 1e-4)], [measured("broadcast", 64, 1e-3)]):
        file = io.BytesIO()
        draw(points).savefig(file, format="png")
        assert file.getvalue().startswith(b"\x89PNG")
