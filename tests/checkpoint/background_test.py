import threading

import pytest

from tfdist.checkpoint import BackgroundWriter


def test_it_writes_beside_the_caller():
    writer, go = BackgroundWriter(), threading.Event()
    done = []
    writer.start(lambda: done.append(go.wait(5)))
    assert writer.is_busy() and not done
    go.set()
    writer.wait()
    assert done == [True]
    assert not writer.is_busy()


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


def test_a_failure_can_be_seen_without_waiting():
    writer, go = BackgroundWriter(), threading.Event()

    def fail() -> None:
        go.wait(5)
        raise OSError("disk full")

    assert writer.failure() is None
    writer.start(fail)
    assert writer.failure() is None
    go.set()
    while writer.is_busy():
        pass
    assert isinstance(writer.failure(), OSError)
    with pytest.raises(OSError, match="disk full"):
        writer.wait()
    assert writer.failure() is None


def test_waiting_for_nothing_is_nothing():
    BackgroundWriter().wait()
