import math

from tfdist.launcher.job_controller import MAX_REJOIN_SECONDS, Slots


def slots(rejoin: float, total: int = 3) -> Slots:
    made = Slots(rejoin)
    made.resize(total)
    return made


def test_the_pause_grows_to_an_hour_and_never_shrinks_what_was_said():
    one = slots(1000.0, total=9)
    for _ in range(9):
        one.disable(1, now=0.0)
    assert [one.count_enabled(now) for now in (999.0, 1000.0, 2000.0, MAX_REJOIN_SECONDS - 1, MAX_REJOIN_SECONDS)] == [
        *(0, 1, 2, 2, 9),
    ]
    two = slots(7200.0)
    two.disable(1, now=0.0)
    two.disable(1, now=0.0)
    assert [two.count_enabled(now) for now in (7199.0, 7200.0)] == [1, 3]


def test_an_hour_with_all_slots_forgets_what_was_before():
    one = slots(10.0)
    for _ in range(3):
        one.disable(1, now=0.0)  # the last one is disabled until 40.0
    again = slots(10.0)
    again.disable(1, now=0.0)
    for made, at in ((one, 40.0), (again, 10.0)):
        made.disable(1, now=at + MAX_REJOIN_SECONDS + 1)
        assert (
            made.count_enabled(at + MAX_REJOIN_SECONDS + 10.9) == 2
            and made.count_enabled(at + MAX_REJOIN_SECONDS + 11) == 3
        )
    soon = slots(10.0)
    soon.disable(1, now=0.0)
    soon.disable(1, now=10.0 + MAX_REJOIN_SECONDS)
    assert soon.count_enabled(29.9 + MAX_REJOIN_SECONDS) == 2


def test_another_number_of_slots_forgets_the_dead():
    one = slots(math.inf)
    one.disable(3, now=0.0)
    one.resize(3)
    assert one.count_enabled(1.0) == 0
    one.resize(2)
    assert one.count_enabled(1.0) == 2
