from tfdist.coordination.client import Liveness


def passes(liveness, clock, seconds, limit=10.0):
    """Lets time pass, with a check every second; returns after how many seconds the other end is silent, or None."""
    for second in range(1, seconds + 1):
        clock.now += 1.0
        if liveness.is_silent(limit):
            return second
    return None


def test_a_pause_of_this_process_is_not_silence_of_the_other(clock):
    liveness = Liveness(1.0, clock)
    clock.now += 1000.0
    assert not liveness.is_silent(10.0)
    assert passes(liveness, clock, 20) == 11
    clock.now += 1000.0
    liveness.record_message()
    assert not liveness.is_silent(10.0)  # nor is it counted twice
    assert passes(liveness, clock, 20) == 11
