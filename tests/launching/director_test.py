"""What is decided, on a clock that only the test moves."""

from collections.abc import Mapping

import pytest

from tfdist.launching.director import SETTLE_SECONDS, Director
from tfdist.launching.job import Job
from tfdist.launching.orders import Kind, Order, Report
from tfdist.launching.outcome import Outcome

KILLED = Outcome(137, "rank 1 ended with code 137 (killed by SIGKILL)", 1)


class Play:
    """A director, its clock, its host list, and what it has said."""

    def __init__(self, listed: Mapping[str, int] | None = None, names: tuple[str, ...] = ("a",), **fields):
        self.now, self.listed, self.said = 0.0, listed, []
        self.met: list[list[str]] = []
        self.director = Director(Job(**fields), self.said.append, lambda: self.listed, lambda: self.now)
        self.director.meet = self.meet
        for name in names:
            self.join(name)

    def meet(self, names):
        self.met.append(list(names))
        return f"host:{len(self.met)}", "secret"

    def join(self, name: str) -> None:
        self.director.joined(name, [name])

    def order(self, name: str = "a", after: float = 0.0) -> Order:
        self.now += after
        return self.director.order(name)

    def runs(self, name: str = "a", after: float = 0.0) -> int:
        """How many processes a launcher is to run; 0 for none."""
        order = self.order(name, after)
        assert order.kind in (Kind.RUN, Kind.WAIT), order
        return order.processes

    def report(self, name: str = "a", code: int = 0, **fields) -> None:
        outcome = KILLED if code == 137 else Outcome(code, f"code {code}" if code else "")
        self.director.reported(name, Report(outcome, **fields))


def elastic(least: int = 2, most: int = 3, **fields) -> Play:
    return Play(processes=most, min_processes=least, **fields)


def test_a_job_runs_once_and_is_over():
    play = Play(processes=2)
    assert play.order() == Order(Kind.RUN, 0, 0, 1, 2)
    play.report(code=0)
    assert play.order() == Order(Kind.OVER, outcome=Outcome(0)) == play.order()
    assert play.said == []


@pytest.mark.parametrize("code", [1, 2, 3, 5, 75, 137])
def test_a_job_that_is_not_tried_again_ends_with_what_happened(code):
    play = Play(processes=2)
    play.runs()
    play.report(code=code, dead=1)
    order = play.order()
    assert order.kind == Kind.OVER and order.outcome.code == code


def test_a_job_of_fixed_size_is_tried_again_as_large_as_before_after_a_pause():
    play = Play(processes=2, max_restarts=1, restart_backoff_seconds=5.0)
    play.runs()
    play.report(code=137, dead=1, step=7)
    assert play.runs() == 0 and play.runs(after=4.9) == 0
    assert play.order(after=0.2) == Order(Kind.RUN, 1, 0, 1, 2)
    assert play.said == [f"{KILLED.reason}. In 5 s: restart 1 of 1 after step 7."]


def test_an_elastic_job_goes_on_at_once_without_the_dead_one_and_grows_when_its_slot_is_back():
    play = elastic(rejoin_seconds=60.0)
    assert play.runs() == 3
    play.report(code=137, dead=1, step=7)
    assert play.order() == Order(Kind.RUN, 1, 0, 1, 2)
    assert play.said == [f"{KILLED.reason}. At once: restart 1 after step 7.", "Attempt 1: 2 processes."]
    assert play.order(after=59.0).kind == Kind.RUN
    stop = play.order(after=1.0)
    assert stop.kind == Kind.STOP and stop.outcome.code == 75
    play.report(code=75)
    assert play.order() == Order(Kind.RUN, 2, 0, 1, 3)


def test_fewer_than_the_least_wait_and_go_on_when_there_are_enough():
    play = elastic(least=2, most=2, listed={"a": 2}, rejoin_seconds=float("inf"))
    assert play.runs() == 2
    play.report(code=137, dead=1)
    assert play.runs() == 0 and play.runs(after=1.0) == 0
    assert play.said[-1] == "Waits for processes: 1 can run, at least 2 must; gives up in 600 s."
    assert play.runs(after=599.0) == 0
    play.listed = {"a": 3}
    assert play.runs() == 2


def test_fewer_than_the_least_do_not_wait_for_a_slot_that_comes_back():
    """Nobody trains meanwhile, so it is tried at once, ever more slowly, as in a job of fixed size."""
    play = elastic(least=2, most=2, listed={"a": 2}, rejoin_seconds=60.0, restart_backoff_seconds=5.0)
    assert play.runs() == 2
    for pause in (5.0, 10.0):
        play.report(code=137, dead=1, step=7)
        assert play.runs() == 0 and play.runs(after=pause - 0.1) == 0
        assert play.runs(after=0.2) == 2
        assert play.runs(after=0.2) == 2  # it is not stopped, though the slot still counts as out
    assert play.said[0] == f"{KILLED.reason}. In 5 s: restart 1 after step 7."


def test_another_slot_is_better_than_one_that_is_out():
    play = elastic(least=2, most=2, listed={"a": 3}, rejoin_seconds=60.0)
    assert play.runs() == 2
    play.report(code=137, dead=1)
    assert play.runs() == 2  # at once


def test_whoever_waits_in_vain_gives_up_and_says_what_for():
    play = elastic(least=2, listed={"a": 1}, elastic_timeout_seconds=30.0)
    assert play.runs() == 0 and play.runs(after=30.0) == 0
    order = play.order(after=0.1)
    assert (order.kind, order.outcome.code) == (Kind.OVER, 5)
    assert order.outcome.reason == "fewer than 2 processes could run for 30 s (--elastic_timeout_seconds)"


def test_waiting_may_last_for_ever():
    play = elastic(least=2, listed={"a": 1}, elastic_timeout_seconds=0.0)
    assert play.runs() == 0 and play.runs(after=1e9) == 0
    assert play.said == ["Waits for processes: 1 can run, at least 2 must."]


def test_a_host_list_that_shrinks_and_grows_resizes_the_job_and_counts_nothing():
    play = elastic(least=1, listed={"a": 3}, max_restarts=0, max_preemptions=0)
    for attempt, slots in enumerate((2, 3, 1, 3), 1):
        assert play.order().kind == Kind.RUN
        play.listed = {"a": slots}
        assert play.order().kind == Kind.STOP
        play.report(code=75)
        assert play.order() == Order(Kind.RUN, attempt, 0, 1, slots)


def test_a_job_that_was_done_when_it_was_told_to_stop_is_done():
    play = elastic(least=1, listed={"a": 3})
    play.runs()
    play.listed = {"a": 2}
    assert play.order().kind == Kind.STOP
    play.report(code=0)
    assert play.order().kind == Kind.OVER


def test_a_program_that_does_not_save_is_resized_all_the_same():
    play = elastic(least=1, listed={"a": 3})
    play.runs()
    play.listed = {"a": 2}
    play.order()
    play.report(code=143)
    assert play.runs() == 2


def test_bad_input_ends_an_elastic_job():
    play = elastic()
    play.runs()
    play.report(code=2, dead=1)
    assert play.order().outcome.code == 2


def test_when_all_have_failed_no_slot_is_taken_and_the_second_time_at_the_same_step_ends_it():
    play = elastic(restart_backoff_seconds=1.0)
    play.runs()
    play.report(code=1, dead=3, step=7)
    assert play.runs() == 0 and play.runs(after=1.0) == 3
    play.report(code=1, dead=3, step=7)
    order = play.order()
    assert (order.kind, order.outcome.code) == (Kind.OVER, 1)
    assert order.outcome.reason == "code 1; the second failure in a row after step 7, so it is not tried again"


def test_deaths_that_strike_one_after_the_other_before_a_step_is_made_are_no_repetition():
    play = elastic(least=1)
    for size in (3, 2):
        assert play.runs() == size
        play.report(code=137, dead=1, step=7)
    assert play.runs() == 1


def test_a_failure_of_a_rank_s_own_that_comes_again_after_the_same_step_ends_the_job():
    play = elastic(least=1)
    for _ in range(2):
        play.runs()
        play.report(code=1, dead=1, step=7)
    assert play.order().outcome.code == 1


def test_a_launcher_of_an_attempt_that_stops_is_told_to_wait_no_more_for_the_others():
    play = elastic(**SEVERAL)
    parted = []
    play.director.part = lambda: parted.append(True)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    play.director.left("b")
    assert play.order("a").kind == play.order("a").kind == Kind.STOP
    assert parted == [True]


def test_who_runs_nothing_ends_with_what_the_others_made_of_it():
    play = elastic(**SEVERAL | {"listed": {"b": 2}})
    play.order("a"), play.order("a", after=SETTLE_SECONDS)
    play.director.end(Outcome(143, "ended by SIGTERM"))
    assert play.order("b").kind == Kind.STOP
    play.report("b", code=75)
    assert play.order("a").outcome.code == 75 == play.order("b").outcome.code


def test_the_number_of_restarts_can_be_limited():
    play = elastic(least=1, max_restarts=1)
    play.runs()
    play.report(code=137, dead=1, step=3)
    play.runs()
    play.report(code=137, dead=1, step=5)
    order = play.order()
    assert order.outcome.code == 137 and "--max_restarts=1 is used up" in order.outcome.reason


def test_whoever_is_asked_to_end_ends_the_job_and_what_has_saved_is_not_run_again():
    play = elastic()
    play.runs()
    play.report(code=75, stopped=True)
    assert play.order() == Order(Kind.OVER, outcome=Outcome(75, "code 75"))


def test_the_end_can_be_asked_for_while_nothing_runs():
    play = elastic(listed={"a": 0})
    assert play.runs() == 0
    play.director.end(Outcome(143, "ended by SIGTERM"))
    assert play.order().outcome.code == 143


SEVERAL = {"coordinator": "a:1", "hosts": "list", "names": ("a", "b"), "listed": {"a": 2, "b": 2}}


def test_several_launchers_share_the_processes_in_the_order_in_which_they_came():
    play = elastic(**SEVERAL)
    assert play.runs("a") == 0 == play.runs("b")  # others may come
    assert play.order("a", after=SETTLE_SECONDS) == Order(Kind.RUN, 0, 0, 2, 2, "host:1", "secret")
    assert play.order("b") == Order(Kind.RUN, 0, 1, 2, 1, "host:1", "secret")
    assert play.met == [["a", "b"]]


def test_a_launcher_that_is_gone_is_not_waited_for_and_the_others_go_on():
    play = elastic(**SEVERAL)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    play.director.left("b", "is lost: no sign of life")
    play.report("a", code=5)
    assert play.runs("a") == 2  # at once
    assert "b is lost: no sign of life." in play.said


def test_a_launcher_that_comes_later_waits_and_joins_when_the_others_have_saved():
    play = elastic(**SEVERAL | {"names": ("a",)})
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    play.join("b")
    assert play.order("b").kind == Kind.WAIT and play.order("a").kind == Kind.RUN
    assert play.order("a", after=SETTLE_SECONDS).kind == Kind.STOP
    play.report("a", code=75)
    assert (play.runs("a"), play.runs("b")) == (2, 1)


def joined_by_another_program(**fields) -> Play:
    """One launcher has trained; another one came, and with it all end by bad input."""
    play = elastic(**SEVERAL | {"names": ("a",)} | fields)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    play.join("b")
    play.runs("a"), play.order("a", after=SETTLE_SECONDS)
    play.report("a", code=75, step=10)
    assert (play.runs("a"), play.runs("b")) == (2, 1)
    play.report("a", code=2)
    play.report("b", code=2, dead=1)
    return play


def test_a_launcher_that_brings_another_program_is_refused_and_the_others_go_on():
    play = joined_by_another_program()
    assert play.order("b") == Order(Kind.OVER, outcome=Outcome(2, "code 2"))
    assert play.runs("a") == 2
    assert "b does not fit the others, and is refused: code 2." in play.said


def test_a_host_that_is_lost_again_and_again_stops_the_others_ever_more_rarely():
    play = elastic(**SEVERAL, rejoin_seconds=60.0)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    for pause, name in ((60.0, "b"), (120.0, "b again")):
        play.director.lost(name, "is lost")
        play.report("a", code=5)
        assert play.runs("a") == 2
        play.director.joined(f"{name} again", ["b"])
        assert play.runs("a", after=pause - 1.0) == 2 and play.order(f"{name} again").kind == Kind.WAIT
        play.order("a", after=2.0)
        assert play.order("a", after=SETTLE_SECONDS).kind == Kind.STOP
        play.report("a", code=75, step=9)
        assert (play.runs("a"), play.runs(f"{name} again")) == (2, 1)


def test_a_host_that_has_said_goodbye_may_come_again_at_once():
    play = elastic(**SEVERAL, rejoin_seconds=60.0)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    play.director.left("b", "has left the job")
    play.report("a", code=5)
    assert play.runs("a") == 2
    play.join("b")
    play.order("a")
    assert play.order("a", after=SETTLE_SECONDS).kind == Kind.STOP


def test_a_launcher_that_is_gone_before_it_is_refused_does_not_end_the_job_either():
    play = elastic(**SEVERAL | {"names": ("a",)})
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    play.join("b")
    play.runs("a"), play.order("a", after=SETTLE_SECONDS)
    play.report("a", code=75, step=10)
    assert (play.runs("a"), play.runs("b")) == (2, 1)
    play.report("b", code=2, dead=1)
    play.director.left("b", "has left the job")
    play.report("a", code=2)
    assert play.runs("a") == 2


def test_the_death_of_one_host_s_process_is_not_another_host_s():
    play = elastic(least=1, **SEVERAL, rejoin_seconds=60.0)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    for left in (1, 0):
        play.report("b", code=137, dead=1)
        play.report("a", code=5)
        assert (play.runs("a"), play.runs("b")) == (2, left)
    play.listed = {"a": 2}
    play.report("a", code=137, dead=1)
    assert play.runs("a") == 1 and play.runs("a", after=59.0) == 1
    play.order("a", after=2.0)
    assert play.order("a", after=SETTLE_SECONDS).kind == Kind.STOP


def test_if_it_comes_again_and_again_the_others_are_stopped_ever_more_rarely():
    play = joined_by_another_program(rejoin_seconds=60.0)
    assert play.runs("a") == 2
    play.director.joined("b again", ["b"])
    assert play.runs("a", after=50.0) == 2 and play.order("b again").kind == Kind.WAIT
    play.order("a", after=20.0)
    assert play.order("a", after=SETTLE_SECONDS).kind == Kind.STOP


def test_bad_input_ends_a_job_of_several_launchers_that_has_never_trained():
    play = elastic(**SEVERAL)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    play.report("a", code=2)
    play.report("b", code=2)
    assert play.order("a").outcome.code == 2 == play.order("b").outcome.code


def test_a_launcher_that_is_asked_to_end_leaves_and_the_job_goes_on():
    play = elastic(**SEVERAL)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    play.report("b", code=75, stopped=True)
    play.report("a", code=75)
    assert play.runs("a") == 2
    assert play.order("b").kind == Kind.WAIT


def test_the_cause_is_whose_end_is_no_consequence():
    play = elastic(**SEVERAL)
    play.runs("a"), play.runs("a", after=SETTLE_SECONDS)
    play.report("a", code=5)
    play.report("b", code=2, dead=1)
    assert play.order("a").outcome.code == 2 == play.order("b").outcome.code
