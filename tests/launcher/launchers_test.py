"""Decisions of the job controller for several launchers, with a simulated clock."""

import pytest

from tests.launcher.play import SEVERAL, Play, elastic
from tfdist.launcher.job import Outcome
from tfdist.launcher.job_controller import SETTLE_SECONDS
from tfdist.launcher.orders import Order, OrderKind, Report


def settled(**fields) -> Play:
    """Returns a job of several launchers that has begun, as no other one has come for a while."""
    play = elastic(**SEVERAL | fields)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    return play


def test_several_launchers_share_the_processes_in_the_order_in_which_they_came():
    play = elastic(**SEVERAL)
    assert play.runs("a") == 0 == play.runs("b")  # more launchers may join
    assert play.order("a", after=SETTLE_SECONDS) == Order(OrderKind.RUN, 0, 0, 2, 2, "host:1")
    assert play.order("b") == Order(OrderKind.RUN, 0, 1, 2, 1, "host:1")
    assert play.met == [(0, 2)]


def test_a_launcher_that_is_gone_is_not_waited_for_and_the_others_go_on():
    play = settled()
    play.controller.remove_launcher("b", "is lost: no heartbeat")
    play.report("a", code=5)
    assert play.runs("a") == 2  # immediately
    assert "b is lost: no heartbeat." in play.said


def joined(**fields) -> Play:
    """Returns a job in which one launcher has trained, another one has joined, and both were started."""
    play = settled(names=("a",), **fields)
    play.join("b")
    play.runs("a"), play.order("a", after=SETTLE_SECONDS)
    play.report("a", code=75, step=10)
    assert (play.runs("a"), play.runs("b")) == (2, 1)
    return play


def test_a_launcher_that_brings_another_program_is_not_used_and_the_others_go_on():
    play = joined()
    play.report("a", code=2)
    play.report("b", code=2, failed_count=1)
    assert (play.runs("a"), play.order("b").kind) == (2, OrderKind.WAIT)
    assert "code 2. 3 processes are too many: at most 2 from now on." in play.said


def test_a_host_that_is_lost_again_and_again_stops_the_others_ever_more_rarely():
    play = settled(rejoin_seconds=60.0)
    for pause, name in ((60.0, "b"), (120.0, "b again")):
        play.controller.lose_launcher(name, "is lost")
        play.report("a", code=5)
        assert play.runs("a") == 2
        play.controller.add_launcher(f"{name} again", ["b"])
        assert play.runs("a", after=pause - 1.0) == 2 and play.order(f"{name} again").kind == OrderKind.WAIT
        play.order("a", after=2.0)
        assert play.order("a", after=SETTLE_SECONDS).kind == OrderKind.STOP
        play.report("a", code=75, step=9)
        assert (play.runs("a"), play.runs(f"{name} again")) == (2, 1)


def test_hosts_that_are_lost_one_after_the_other_before_a_step_is_made_are_no_repetition():
    play = settled(names=tuple("abcd"), listed=dict.fromkeys("abcd", 2), most=4)
    for lost, other in ("bc", "cd"):
        assert play.runs(lost) == 2
        play.controller.lose_launcher(lost, "is lost")
        play.report("a", code=5, step=7)
        assert (play.runs("a"), play.runs(other)) == (2, 2)  # the same number as before


def test_a_host_that_has_said_goodbye_may_come_again_at_once():
    play = settled(rejoin_seconds=60.0)
    play.controller.remove_launcher("b", "has left the job")
    play.report("a", code=5)
    assert play.runs("a") == 2
    play.join("b")
    play.order("a")
    assert play.order("a", after=SETTLE_SECONDS).kind == OrderKind.STOP


@pytest.mark.parametrize("code, dead", [(5, (0, 0)), (1, (2, 1)), (1, (0, 1)), (137, (1, 0))])
def test_a_launcher_with_which_nothing_begins_stops_the_others_ever_more_rarely(code, dead):
    """It hangs at startup, or cannot be reached, so that the cause is unknown."""
    play = joined(rejoin_seconds=60.0, least=1)
    for pause in (60.0, 120.0):
        play.report("a", code=code, failed_count=dead[0])
        play.report("b", code=5 if code == 137 else code, failed_count=dead[1])
        assert play.order("b").kind == OrderKind.WAIT and play.order("a").nodes == 1  # immediately
        assert "No training has begun with b: the others continue without it for a while." in play.said
        assert play.runs("b", after=pause - 1.0) == 0
        play.order("a", after=2.0)
        assert play.order("a", after=SETTLE_SECONDS).kind == OrderKind.STOP
        play.report("a", code=75, step=20)
        assert play.runs("a") and play.runs("b")


def test_whoever_has_no_patience_waits_for_nobody():
    play = joined()
    play.report("a", code=75, stopped=True)
    play.controller.end(Outcome(143, "ended by SIGTERM"))
    assert play.order("a").kind == OrderKind.WAIT and play.order("b").kind == OrderKind.STOP
    play.controller.end(Outcome(143, "ended by SIGTERM"), is_immediate=True)
    assert play.order("a") == Order(OrderKind.OVER, outcome=Outcome(143, "ended by SIGTERM"))
    assert play.order("b").kind == OrderKind.OVER


def test_with_too_few_others_it_is_tried_again_after_a_pause():
    play = joined(restart_backoff_seconds=5.0)
    play.listed = {"a": 1, "b": 2}
    assert play.order("a").kind == OrderKind.STOP
    play.report("a", code=75)
    play.report("b", code=75)
    for pause in (5.0, 10.0):
        assert (play.runs("a"), play.runs("b")) == (1, 2)
        play.report("a", code=5)
        play.report("b", code=5)
        assert play.runs("a") == 0 and play.runs("a", after=pause - 0.1) == 0
        play.now += 0.2
    assert not any("continue without it" in line for line in play.said)


def test_a_launcher_that_is_preempted_as_it_starts_keeps_its_slots():
    play = joined()
    play.report("a", code=5)
    play.report("b", code=143, failed_count=1)
    assert (play.runs("a"), play.runs("b")) == (2, 1)


def test_the_death_of_one_host_s_process_is_not_another_host_s():
    play = settled(least=1, rejoin_seconds=60.0)
    for left in (1, 0):
        play.report("b", code=137, failed_count=1)
        play.report("a", code=5)
        assert (play.runs("a"), play.runs("b")) == (2, left)
    play.listed = {"a": 2}
    play.report("a", code=137, failed_count=1)
    assert play.runs("a") == 1 and play.runs("a", after=59.0) == 1
    play.order("a", after=2.0)
    assert play.order("a", after=SETTLE_SECONDS).kind == OrderKind.STOP


@pytest.mark.parametrize("code", [1, 137, 143])
def test_a_host_on_which_nothing_starts_does_not_end_a_job_that_others_can_do(code):
    """Its processes fail one after another, even if training has never begun."""
    play = settled(least=1, most=4, listed={"a": 2, "b": 9})
    for left in (2,) * 7 + (1, 0):
        play.report("b", code=code, failed_count=1)
        play.report("a", code=5)
        assert (play.runs("a"), play.runs("b")) == (2, left)


@pytest.mark.parametrize("code", [1, 5, 137])
def test_a_process_that_only_another_launcher_sees_die_is_its_own_launcher_s(code):
    """It has sent a goodbye, or is silent, and its launcher ends it before it ends by itself."""
    play = settled(least=1, listed={"a": 2, "b": 1})
    play.controller.record_report("a", Report(Outcome(code, "rank 2 is the cause", 2), step=7))
    play.controller.record_report("b", Report(Outcome(code, "node 0 is lost")))
    assert (play.runs("a"), play.runs("b")) == (2, 0)
    assert play.said[-2] == "rank 2 is the cause. At once: restart 1 after step 7."


def test_a_launcher_that_is_asked_to_end_leaves_and_the_job_goes_on():
    play = settled()
    play.report("b", code=75, stopped=True)
    play.report("a", code=75)
    assert play.runs("a") == 2
    assert play.order("b").kind == OrderKind.WAIT


def test_the_cause_is_whose_end_is_no_consequence():
    play = settled()
    play.report("a", code=5)
    play.report("b", code=2, failed_count=1)
    assert play.order("a").outcome.code == 2 == play.order("b").outcome.code
