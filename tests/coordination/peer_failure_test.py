import contextlib
import io
import os
import threading
import time

import pytest

from tests.waiting import DEADLINE, wait_for
from tfdist.cluster.environment import Cluster
from tfdist.coordination import LostMember, PeerFailureHandler
from tfdist.errors import NotFiniteError, PeerLostError

pytestmark = [pytest.mark.processes, pytest.mark.waits]

CLUSTER = Cluster(rank=0, size=3)
LINE = "rank 0 of 3: rank 1 is lost: its connection closed without a goodbye (it was killed, crashed, or exited silently). "


class Unprintable(Exception):
    """An error without a text."""

    def __str__(self):
        raise KeyError("text")


@pytest.fixture
def watched(job, monkeypatch):
    monkeypatch.setattr("tfdist.coordination.peer_failure.LOSS_NOTICE_SECONDS", 0.5)
    monkeypatch.setattr("tfdist.coordination.peer_failure.OWN_FAILURE_SECONDS", 1.0)
    three = job(3)
    three.stream, three.codes = io.StringIO(), []
    three.handler = PeerFailureHandler(three.members[0], CLUSTER, three.stream, grace=0.3, end=three.codes.append)
    return three


def kill(three, rank):
    three.members[rank]._client._disconnect()


FAILED = "rank 0 of 3: rank 1 is lost: ended with code 3 (loss not finite): step 7. "


@pytest.mark.parametrize("line", [LINE, FAILED])
def test_a_main_thread_that_is_stuck_is_ended_after_one_line(watched, line):
    began = time.monotonic()
    kill(watched, 1) if line == LINE else watched.members[1].leave(3, "step 7")
    wait_for(lambda: watched.codes)
    assert time.monotonic() - began > 0.2
    assert watched.stream.getvalue() == line + "Ending with code 5.\n"
    assert watched.codes == [5]


def test_output_that_nobody_reads_does_not_keep_a_process_from_ending(job):
    """As the pipe to a launcher that is stopped, filled by warnings of the engine."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    three, codes = job(3), []
    with open(reading, "rb") as pipe, open(writing, "w") as stream:
        PeerFailureHandler(three.members[0], CLUSTER, stream, grace=0.3, end=codes.append)
        kill(three, 1)
        wait_for(lambda: codes)
        pipe.read1(1 << 20)  # so that the blocked threads end
    assert codes == [5]


def test_whoever_has_left_with_a_code_of_its_own_ends_with_that(watched):
    """A stall ends all processes at the same time, in which peers and engines fail, too."""
    watched.members[0].leave(4, "stalled")
    with pytest.raises(RuntimeError), watched.handler:
        watched.members[0]._client._losses.append(LostMember(1, "ended with code 4 (stalled)", 4))
        raise RuntimeError("the engine failed")
    assert set(watched.codes) == {4} and watched.stream.getvalue() == ""


def test_an_engines_error_that_outruns_the_news_ends_with_code_5_and_one_line(watched, monkeypatch):
    monkeypatch.setattr("tfdist.coordination.peer_failure.LOSS_NOTICE_SECONDS", DEADLINE)
    threading.Timer(0.2, kill, (watched, 1)).start()
    with pytest.raises(RuntimeError), watched.handler:
        raise RuntimeError("UnavailableError: connection reset")
    time.sleep(0.5)
    assert watched.stream.getvalue().count("\n") == 1 and watched.stream.getvalue().startswith(LINE)
    assert set(watched.codes) == {5}


def test_an_error_without_a_loss_is_an_error(watched):
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), watched.handler:
        1 / 0  # noqa: B018
    assert time.monotonic() - began > 0.4  # waited for a notice of a loss
    assert watched.stream.getvalue() == "" and watched.codes == []
    told = wait_for(watched.members[1].first_loss)
    assert str(told) == "rank 0 is lost: ended with code 1 (failed): ZeroDivisionError: division by zero"


def test_what_ends_all_of_its_own_is_nobodys_loss(watched, monkeypatch):
    """All ranks see that the loss is not finite; one that is notified of another's end first still reports its own error."""
    monkeypatch.setattr("tfdist.coordination.peer_failure.OWN_FAILURE_SECONDS", DEADLINE)
    watched.members[1].leave(3, "step 7")
    with pytest.raises(NotFiniteError), watched.handler:
        assert wait_for(watched.members[0].first_loss)
        raise NotFiniteError("step 7")
    assert watched.stream.getvalue() == "" and watched.codes == []


def test_a_gather_that_fails_by_a_loss_is_told_of_once(watched):
    kill(watched, 1)
    with pytest.raises(PeerLostError), watched.handler:
        watched.members[0].gather("x", 1)
    assert watched.stream.getvalue().count("\n") == 1 and set(watched.codes) == {5}


def test_without_a_loss_it_leaves_quietly(watched):
    with watched.handler:
        pass
    assert watched.stream.getvalue() == "" and watched.codes == []
    assert watched.members[1].first_loss(wait=0.1) is None


@pytest.mark.parametrize(
    "error, told",
    [
        (SystemExit(0), "None"),
        (SystemExit("no"), "rank 0 is lost: ended with code 1 (failed)"),
        (SystemExit(75), "None"),  # a preemption, on which all ranks agree
        (SystemExit(42), "rank 0 is lost: ended with code 42"),
        (SystemExit(300), "rank 0 is lost: ended with code 44"),  # as the process does
        (SystemExit(True), "rank 0 is lost: ended with code 1 (failed)"),
        (Unprintable(), "rank 0 is lost: ended with code 1 (failed): Unprintable: <exception str() failed>"),
        (KeyboardInterrupt(), "rank 0 is lost: ended with code 130 (killed by SIGINT)"),
    ],
)
def test_ways_to_end_are_told_by_their_code(watched, error, told):
    with pytest.raises(BaseException) as raised, watched.handler:
        raise error
    assert raised.value is error
    lost = watched.members[1].first_loss
    assert str(lost(wait=0.3) if told == "None" else wait_for(lost)) == told


def test_a_closed_handler_ends_nothing(watched):
    watched.handler.close()
    kill(watched, 1)
    assert wait_for(watched.members[0].first_loss)
    time.sleep(0.6)
    assert not watched.codes
