from tfdist.coordination.client import Liveness
from tfdist.coordination.messages import MIN_BYTES_PER_SECOND, MessageReader


def passes(liveness, clock, seconds, limit=10.0):
    """Lets time pass, with a check every second; returns after how many seconds the other end is silent, or None."""
    for second in range(1, seconds + 1):
        clock.now += 1.0
        if liveness.is_silent(limit):
            return second
    return None


def test_parts_of_a_message_do_not_count_as_one(clock):
    lines = MessageReader(10 * MIN_BYTES_PER_SECOND)
    liveness = Liveness(lines, 1.0, clock)
    for _ in range(9):
        list(lines.feed(b"x"))
        assert passes(liveness, clock, 1) is None
    assert passes(liveness, clock, 20) == 2


def test_a_message_may_take_its_time_at_the_slowest_rate(clock):
    lines = MessageReader(100 * MIN_BYTES_PER_SECOND)
    liveness = Liveness(lines, 1.0, clock)
    for _ in range(60):
        list(lines.feed(b"x" * MIN_BYTES_PER_SECOND))
        assert passes(liveness, clock, 1) is None
    assert passes(liveness, clock, 20) == 11  # when nothing more arrives


def test_a_pause_of_this_process_is_not_silence_of_the_other(clock):
    liveness = Liveness(MessageReader(100), 1.0, clock)
    clock.now += 1000.0
    assert not liveness.is_silent(10.0)
    assert passes(liveness, clock, 20) == 11
    clock.now += 1000.0
    liveness.record_message()
    assert not liveness.is_silent(10.0)  # nor is it counted twice
    assert passes(liveness, clock, 20) == 11
