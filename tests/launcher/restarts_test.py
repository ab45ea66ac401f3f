import pytest

from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_controller import MAX_EARLY_FAILURES, MAX_LATER_FAILURES, Restarts


def waits(restarts: Restarts, *ends: tuple[int, int | None]) -> list[float | None]:
    return [restarts.decide(Outcome(code, "why"), step).wait for code, step in ends]


def test_by_default_nothing_is_tried_again_and_nothing_is_said_of_it():
    for code in (0, 1, 2, 3, 4, 5, 6, 42, 75, 137):
        assert Restarts(Job()).decide(Outcome(code), 7) == (None, "")


def test_pauses_double_up_to_a_minute():
    restarts = Restarts(Job(max_restarts=9, restart_backoff_seconds=1.0))
    assert waits(restarts, *[(1, step) for step in range(10)]) == [1, 2, 4, 8, 16, 32, 60, 60, 60, None]


@pytest.mark.parametrize(
    "code, again", [(0, False), (1, True), (2, False), (3, False), (4, True), (5, True), (6, True)]
)
def test_codes_that_are_worth_another_attempt(code, again):
    assert (Restarts(Job(max_restarts=1)).decide(Outcome(code), None).wait is not None) == again


def test_two_failures_in_a_row_after_the_same_step_are_one_that_repeats():
    restarts = Restarts(Job(max_restarts=9))
    assert waits(restarts, (1, 7), (1, 5), (137, 7), (1, 7))[-2:] == [4, None]
    assert "after step 7" in Restarts(Job(max_restarts=9)).decide(Outcome(1), 7).reason


def endless(**fields) -> Restarts:
    return Restarts(Job(processes=2, min_processes=1, **fields))


@pytest.mark.parametrize("code, flag", [(1, "max_restarts"), (137, "max_restarts"), (143, "max_preemptions")])
def test_failures_in_a_row_before_training_began_end_a_job_that_is_tried_for_ever(code, flag):
    restarts = endless()
    assert waits(restarts, *[(code, None)] * (MAX_EARLY_FAILURES - 1)) == [1, 2, 4, 8]
    assert restarts.decide(Outcome(code), None) == (
        None,
        f"5 failures in a row before training began, so the job is not restarted; --{flag}=N sets another limit",
    )


def test_they_are_in_a_row_until_a_step_is_noted():
    assert waits(endless(), (143, None), (1, None), (143, None), (137, None), (1, None)) == [1, 1, 2, 2, None]
    assert None not in waits(endless(), *[(1, None), (143, None), (1, step := 7), (143, step)] * MAX_EARLY_FAILURES)


def test_once_training_had_begun_it_takes_more_of_them():
    restarts = endless()
    restarts.record_training()
    assert None not in waits(restarts, *[(1, None)] * (MAX_LATER_FAILURES - 1))
    decision = restarts.decide(Outcome(1), None)
    assert decision.wait is None and decision.reason.startswith(
        "15 failures in a row before training made progress, so the job is"
    )


def test_a_program_that_asks_to_be_run_again_is_ever_more_slowly():
    assert waits(endless(), *[(75, None)] * 9) == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert waits(endless(restart_backoff_seconds=90.0), *[(75, None)] * 3) == [90, 90, 90]
    assert waits(endless(), (75, None), (75, None), (75, 7), (75, None), (75, None)) == [1, 2, 1, 1, 2]


def test_preemptions_have_a_budget_of_their_own_and_part_failures():
    restarts = Restarts(Job(max_restarts=2, max_preemptions=1))
    assert waits(restarts, (1, 7), (75, 7), (1, 7), (75, 9)) == [1, 1, 2, None]
