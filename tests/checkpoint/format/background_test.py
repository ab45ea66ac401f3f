import threading

import pytest

from tfdist.checkpoint.format import BackgroundWriter


def test_it_writes_beside_the_caller():
    writer, go = BackgroundWriter(), threading.Event()
    done = []
    writer.start(lambda: done.append(go.wait(60)))
    assert not done
    go.set()
    writer.wait()
    assert done == [True]


def test_one_thing_at_a_time_in_order():
    writer, first = BackgroundWriter(), threading.Event()
    order = []
    writer.start(lambda: (first.wait(0.05), order.append(1)))
    writer.start(lambda: order.append(2))
    assert order[0] == 1
    writer.wait()
    assert order == [1, 2]


def test_what_went_wrong_is_raised_once_where_somebody_waits():
    writer, done = BackgroundWriter(), []

    def fail() -> None:
        raise OSError("disk full")

    writer.start(fail)
    with pytest.raises(OSError, match="disk full"):
        writer.start(lambda: done.append(1))
    assert not done
    writer.wait()
    writer.start(lambda: done.append(1))
    writer.wait()
    assert done == [1]


def test_waiting_for_nothing_is_nothing():
    BackgroundWriter().wait()
