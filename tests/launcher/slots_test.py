import math

import pytest

from tfdist.launcher.job_controller import LONGEST_REJOIN_SECONDS, Slots


def slots(rejoin: float, offered: int = 3) -> Slots:
    made = Slots(rejoin)
    made.offer(offered)
    return made


def test_a_death_takes_a_slot_for_a_while_and_the_next_one_for_twice_as_long():
    one = slots(10.0)
    one.died(1, now=100.0)
    assert [one.free(now) for now in (100.0, 109.9, 110.0)] == [2, 2, 3]
    one.died(2, now=200.0)
    assert [one.free(now) for now in (200.0, 219.9, 220.0)] == [1, 1, 3]


def test_the_pause_grows_to_an_hour_and_never_shrinks_what_was_said():
    one = slots(1000.0, offered=9)
    for _ in range(9):
        one.died(1, now=0.0)
    assert [one.free(now) for now in (999.0, 1000.0, 2000.0, LONGEST_REJOIN_SECONDS - 1, LONGEST_REJOIN_SECONDS)] == [
        *(0, 1, 2, 2, 9),
    ]
    two = slots(7200.0)
    two.died(1, now=0.0)
    two.died(1, now=0.0)
    assert [two.free(now) for now in (7199.0, 7200.0)] == [1, 3]


def test_an_hour_with_all_slots_forgets_what_was_before():
    one = slots(10.0)
    for _ in range(3):
        one.died(1, now=0.0)  # the last one is disabled until 40.0
    again = slots(10.0)
    again.died(1, now=0.0)
    for made, at in ((one, 40.0), (again, 10.0)):
        made.died(1, now=at + LONGEST_REJOIN_SECONDS + 1)
        assert made.free(at + LONGEST_REJOIN_SECONDS + 10.9) == 2 and made.free(at + LONGEST_REJOIN_SECONDS + 11) == 3
    soon = slots(10.0)
    soon.died(1, now=0.0)
    soon.died(1, now=10.0 + LONGEST_REJOIN_SECONDS)
    assert soon.free(29.9 + LONGEST_REJOIN_SECONDS) == 2


def test_nobody_s_death_changes_nothing():
    one = slots(10.0)
    for _ in range(5):
        one.died(0, now=0.0)
    one.died(1, now=0.0)
    assert [one.free(now) for now in (9.9, 10.0)] == [2, 3]


@pytest.mark.parametrize("rejoin, free", [(0.0, 3), (math.inf, 2)])
def test_at_once_or_never(rejoin, free):
    one = slots(rejoin)
    one.died(1, now=0.0)
    assert one.free(1e9) == free


def test_another_number_of_slots_forgets_the_dead():
    one = slots(math.inf)
    one.died(3, now=0.0)
    one.offer(3)
    assert one.free(1.0) == 0
    one.offer(2)
    assert one.free(1.0) == 2
