"""Decisions of the job controller, with a simulated clock."""

import pytest

from tests.launcher.play import KILLED, SEVERAL, Play, elastic
from tfdist.launcher.job import Outcome
from tfdist.launcher.job_controller import SETTLE_SECONDS
from tfdist.launcher.orders import Order, OrderKind


@pytest.mark.parametrize("code", [0, 1, 2, 3, 5, 75, 137])
def test_a_job_that_is_not_tried_again_ends_with_what_happened(code):
    play = Play(processes=2)
    play.runs()
    play.report(code=code, failed_count=1)
    order = play.order()
    assert order.kind == OrderKind.OVER and order.outcome.code == code
    assert play.order() == order and play.said == []


def test_a_job_of_fixed_size_is_tried_again_as_large_as_before_after_a_pause():
    play = Play(processes=2, max_restarts=1, restart_backoff_seconds=5.0)
    play.runs()
    play.report(code=137, failed_count=1, step=7)
    assert play.runs() == 0 and play.runs(after=4.9) == 0
    assert play.order(after=0.2) == Order(OrderKind.RUN, 1, 0, 1, 2)
    assert play.said == [f"{KILLED.reason}. In 5 s: restart 1 of 1 after step 7."]


def test_an_elastic_job_goes_on_at_once_without_the_dead_one_and_grows_when_its_slot_is_back():
    play = elastic(rejoin_seconds=60.0)
    assert play.runs() == 3
    play.report(code=137, failed_count=1, step=7)
    assert play.order() == Order(OrderKind.RUN, 1, 0, 1, 2)
    assert play.said == [f"{KILLED.reason}. At once: restart 1 after step 7.", "Attempt 1: 2 processes."]
    assert play.order(after=59.0).kind == OrderKind.RUN
    stop = play.order(after=1.0)
    assert stop.kind == OrderKind.STOP and stop.outcome.code == 75
    play.report(code=75)
    assert play.order() == Order(OrderKind.RUN, 2, 0, 1, 3)


def test_fewer_than_the_least_wait_and_go_on_when_there_are_enough():
    """Horovod's elastic driver waits forever in this case: https://github.com/horovod/horovod/issues/3494."""
    play = elastic(least=2, most=2, listed={"a": 2}, rejoin_seconds=float("inf"))
    assert play.runs() == 2
    play.report(code=137, failed_count=1)
    assert play.runs() == 0 and play.runs(after=1.0) == 0
    assert play.said[-1] == "Waiting for processes: 1 can run, at least 2 are needed; giving up in 600 s."
    assert play.runs(after=599.0) == 0
    play.listed = {"a": 3}
    assert play.runs() == 2


def test_fewer_than_the_least_do_not_wait_for_a_slot_that_comes_back():
    """No process trains meanwhile, so the job is restarted with backoff, as one of fixed size."""
    play = elastic(least=2, most=2, listed={"a": 2}, rejoin_seconds=60.0, restart_backoff_seconds=5.0)
    assert play.runs() == 2
    for pause, step in ((5.0, 7), (10.0, 9)):
        play.report(code=137, failed_count=1, step=step)
        assert play.runs() == 0 and play.runs(after=pause - 0.1) == 0
        assert play.runs(after=0.2) == 2
        assert play.runs(after=0.2) == 2  # not stopped, although the slot is still disabled
    assert play.said[0] == f"{KILLED.reason}. In 5 s: restart 1 after step 7."


def test_whoever_waits_in_vain_gives_up_and_says_what_for():
    play = elastic(least=2, listed={"a": 1}, elastic_timeout_seconds=30.0)
    assert play.runs() == 0 and play.runs(after=30.0) == 0
    order = play.order(after=0.1)
    assert (order.kind, order.outcome.code) == (OrderKind.OVER, 5)
    assert order.outcome.reason == "fewer than 2 processes could run for 30 s (--elastic_timeout_seconds)"


def test_waiting_may_last_for_ever():
    play = elastic(least=2, listed={"a": 1}, elastic_timeout_seconds=0.0)
    assert play.runs() == 0 and play.runs(after=1e9) == 0
    assert play.said == ["Waiting for processes: 1 can run, at least 2 are needed."]


def test_a_host_list_that_shrinks_and_grows_resizes_the_job_and_counts_nothing():
    play = elastic(least=1, listed={"a": 3}, max_restarts=0, max_preemptions=0)
    for attempt, slots in enumerate((2, 3, 1, 3), 1):
        assert play.order().kind == OrderKind.RUN
        play.listed = {"a": slots}
        assert play.order().kind == OrderKind.STOP
        play.report(code=75)
        assert play.order() == Order(OrderKind.RUN, attempt, 0, 1, slots)


@pytest.mark.parametrize(
    "code, after",
    [
        (0, Order(OrderKind.OVER, outcome=Outcome(0))),  # it was done when it was told to stop
        (143, Order(OrderKind.RUN, 1, 0, 1, 2)),  # the program does not save
    ],
)
def test_what_ends_otherwise_than_by_saving_when_it_is_told_to_stop(code, after):
    play = elastic(least=1, listed={"a": 3})
    play.runs()
    play.listed = {"a": 2}
    assert play.order().kind == OrderKind.STOP
    play.report(code=code)
    assert play.order() == after


def test_bad_input_of_more_processes_than_have_trained_keeps_the_job_to_those_for_good():
    """For example, if the batch cannot be divided among so many replicas."""
    play = elastic(least=1, most=4, listed={"a": 2}, max_restarts=0)
    assert play.runs() == 2
    play.listed = {"a": 3}
    assert play.order().kind == OrderKind.STOP
    play.report(code=75, step=20)
    assert play.runs() == 3
    play.report(code=2, failed_count=3)
    assert play.runs() == 2
    assert play.said[-2] == "code 2. 3 processes are too many: at most 2 from now on."
    play.listed = {"a": 9}
    assert play.runs(after=1e6) == 2
    play.report(code=2, failed_count=2)
    assert play.order().outcome.code == 2  # does not depend on the size


@pytest.mark.parametrize("sizes", [(3,), (3, 2)])
def test_bad_input_of_no_more_processes_than_have_trained_ends_the_job(sizes):
    play = elastic(least=1, listed={"a": 3})
    for size in sizes:
        play.listed = {"a": size}
        play.order(after=5.0)
        play.report(code=75, step=20)
        play.order()
    assert play.runs(after=5.0) == sizes[-1]
    play.report(code=2, failed_count=1)
    assert play.order().outcome.code == 2


def test_what_a_rank_forbids_to_start_again_ends_the_job_also_where_it_was_to_be_resized():
    for resized in (False, True):
        play = elastic(least=1, listed={"a": 3})
        play.runs()
        play.listed = {"a": 2 if resized else 3}
        assert play.order().kind == (OrderKind.STOP if resized else OrderKind.RUN)
        play.report(code=1, failed_count=3, step=7, final=True)
        order = play.order()
        assert (order.kind, order.outcome.code) == (OrderKind.OVER, 1) and "is not restarted" in order.outcome.reason


def test_when_all_have_failed_no_slot_is_taken_and_the_second_time_at_the_same_step_ends_it():
    play = elastic(restart_backoff_seconds=1.0)
    play.runs()
    play.report(code=1, failed_count=3, step=7)
    assert play.runs() == 0 and play.runs(after=1.0) == 3
    play.report(code=1, failed_count=3, step=7)
    order = play.order()
    assert (order.kind, order.outcome.code) == (OrderKind.OVER, 1)
    assert order.outcome.reason == "code 1; the second failure in a row after step 7, so the job is not restarted"


def test_deaths_that_strike_one_after_the_other_before_a_step_is_made_are_no_repetition():
    play = elastic(least=1)
    for size in (3, 2):
        assert play.runs() == size
        play.report(code=137, failed_count=1, step=7)
    assert play.runs() == 1


@pytest.mark.parametrize(
    "sizes, fields, code",
    [
        ((2, 2), {"least": 2, "most": 2}, 137),
        ((3, 2, 3), {"least": 2, "most": 3}, 137),  # disabled slots are used, as one process is too few
        ((3, 3), {"least": 2, "most": 3, "listed": {"a": 9}}, 137),
        ((3, 3), {"least": 1, "most": 3, "rejoin_seconds": 0.0}, 137),
        ((3, 2), {"least": 1}, 1),  # a failure of a rank's own, although the job has become smaller
    ],
)
def test_what_strikes_again_after_the_same_step_ends_the_job(sizes, fields, code):
    play = elastic(**fields)
    for size in sizes:
        play.order()
        assert play.runs(after=5.0) == size  # after the backoff
        play.report(code=code, failed_count=1, step=7)
    reason = play.order().outcome.reason
    assert "the second failure in a row after step 7, so the job is not restarted" in reason


def attempts(play: Play, limit: int = 40, lasts: float = 0.0, **report) -> list[int]:
    """Returns the sizes of attempts that all end with the same report, until the job is over or the limit is reached."""
    found: list[int] = []
    while len(found) < limit and play.order().kind != OrderKind.OVER:
        found.append(play.runs() or play.runs(after=60.0))  # after the backoff
        play.now += lasts
        play.report(**report)
    return found


@pytest.mark.parametrize(
    "fields, failed_count, sizes",
    [
        ({"least": 2}, 3, [3] * 5),  # for example, a mistake in the command
        ({"least": 1, "rejoin_seconds": float("inf")}, 1, [3, 2] + [1] * 5),  # the others were ended as a consequence
        ({"least": 2}, 1, [3, 2, 2, 2, 3, 3]),  # if one of two fails, the rest are too few
        ({"least": 1, "rejoin_seconds": 0.0}, 1, [3] * 5),
    ],
)
def test_a_job_that_fails_again_and_again_before_training_began_is_over(fields, failed_count, sizes):
    play = elastic(**fields)
    assert attempts(play, code=1, failed_count=failed_count) == sizes
    reason = play.order().outcome.reason
    assert reason.startswith("code 1; 5 failures in a row before training began, so the job is not restarted")


def test_a_program_that_notes_no_steps_and_runs_for_long_is_tried_for_ever():
    play = elastic()
    assert attempts(play, lasts=3600.0, code=1, failed_count=3) == [3] * 40
    assert len(attempts(elastic(), lasts=3000.0, code=1, failed_count=3)) < 10


def test_peers_that_are_lost_before_training_began_are_waited_for_again_and_again():
    assert len(attempts(elastic(), code=5)) == 40


def test_a_launcher_of_an_attempt_that_stops_is_told_to_wait_no_more_for_the_others():
    play = elastic(**SEVERAL)
    parted = []
    play.controller.close_group = lambda: parted.append(True)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    play.controller.remove_launcher("b")
    assert play.order("a").kind == play.order("a").kind == OrderKind.STOP
    assert parted == [True]


def test_who_runs_nothing_ends_with_what_the_others_made_of_it():
    play = elastic(**SEVERAL | {"listed": {"b": 2}})
    play.order("a"), play.order("a", after=SETTLE_SECONDS)
    play.controller.end(Outcome(143, "ended by SIGTERM"))
    assert play.order("b").kind == OrderKind.STOP
    play.report("b", code=75)
    assert play.order("a").outcome.code == 75 == play.order("b").outcome.code


def test_whoever_is_asked_to_end_ends_the_job_and_what_has_saved_is_not_run_again():
    play = elastic()
    play.runs()
    play.report(code=75, stopped=True)
    assert play.order() == Order(OrderKind.OVER, outcome=Outcome(75, "code 75"))
