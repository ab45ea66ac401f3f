import math

from hypothesis import given
from hypothesis import strategies as st

from tfdist.coordination.server import PendingOperations


def call(rounds, rank, ticket, name="x", value=None, deadline=10.0, now=0.0, place="", ranks=None):
    message = {"ticket": ticket, "name": name, "value": value, "deadline": deadline, "place": place, "ranks": ranks}
    return rounds.add(rank, message, now)


def add(*arguments, **options):
    return [(answer.rank, answer.message) for answer in call(*arguments, **options)]


def test_a_member_that_is_ahead_opens_the_names_next_round():
    rounds = PendingOperations(2)
    add(rounds, 0, 1, value="first")
    add(rounds, 0, 2, value="second")
    first, second = add(rounds, 1, 1, value="1"), add(rounds, 1, 2, value="2")
    assert first[0] == (0, {"type": "values", "ticket": 1, "values": ["first", "1"]})
    assert second[0] == (0, {"type": "values", "ticket": 2, "values": ["second", "2"]})


def test_the_shortest_deadline_fails_the_round_for_all_and_for_those_who_come_later():
    rounds = PendingOperations(4, describe_absence=lambda missing: f" ({missing})")
    add(rounds, 0, 1, deadline=60.0, now=0.0)
    add(rounds, 1, 1, deadline=5.0, now=2.0)
    assert rounds.next_expiry() == 7.0
    assert rounds.expire(6.9) == []
    answers = rounds.expire(7.0)
    assert {answer.rank for answer in answers} == {0, 1}
    assert answers[0].message["failure"] == "ranks 2, 3 did not reach 'x' within 5 s ([2, 3])."
    assert add(rounds, 2, 1, now=8.0)[0][1]["failure"] == answers[0].message["failure"]
    assert add(rounds, 0, 2, now=8.0) == []  # the next use of the name
    add(rounds, 3, 1, now=8.0)
    assert [len(open_rounds) for open_rounds in rounds._operations.values()] == [1]  # the failed one was removed


def test_ranks_that_all_wait_for_each_other_are_told_so_and_where():
    rounds = PendingOperations(2)
    call(rounds, 0, 1, "fit", None, 600.0, 0.0, "train.py, line 3")
    assert rounds.expire(100.0) == []  # rank 1 may still arrive
    call(rounds, 1, 1, "end", None, 600.0, 100.0, "train.py, line 9")
    assert rounds.expire(109.0) == []
    answers = rounds.expire(110.0)
    assert {answer.rank for answer in answers} == {0, 1}
    assert all(answer.message["misuse"] for answer in answers)
    for part in ("rank 0 in 'fit' at train.py, line 3", "rank 1 in 'end' at train.py, line 9", "the same calls"):
        assert part in answers[0].message["failure"]


def test_a_thread_that_waits_beside_the_main_one_is_no_standstill():
    rounds = PendingOperations(2)
    call(rounds, 0, 1, "fit", None, math.inf, 0.0, "train.py, line 3")
    call(rounds, 1, 1, "meeting", None, math.inf, 0.0, "")
    assert rounds.expire(1000.0) == []


def test_a_round_that_completes_ends_the_standstill():
    rounds = PendingOperations(2)
    call(rounds, 0, 1, "fit", None, math.inf, 0.0, "here")
    call(rounds, 1, 1, "saved", None, math.inf, 0.0, "there")
    call(rounds, 0, 2, "saved", None, math.inf, 5.0, "")  # another thread of rank 0
    assert rounds.expire(1000.0) == []


def test_who_waits_long_is_told_once_for_whom():
    rounds = PendingOperations(3)
    call(rounds, 1, 1, "fit", None, math.inf, 0.0, "train.py, line 3")
    assert rounds.overdue_notices(19.0) == []
    (answer,) = rounds.overdue_notices(20.0)
    assert answer.rank == 1
    assert answer.message == {"type": "waiting", "name": "fit", "missing": "ranks 0, 2", "place": "train.py, line 3"}
    assert rounds.overdue_notices(30.0) == []


def test_a_rank_that_waits_for_some_that_stand_still_is_told_with_them():
    for began, told in ((5.0, [0, 1]), (0.0, [0, 1, 3])):  # first, rank 3 has only waited for 5 s
        rounds = PendingOperations(4)
        call(rounds, 0, 1, "x", None, math.inf, 0.0, "a", (0, 1))
        call(rounds, 1, 1, "x", None, math.inf, 0.0, "b", (0, 1, 2))
        call(rounds, 3, 1, "end", None, math.inf, began, "c")
        assert [answer.rank for answer in rounds.expire(10.0)] == told


def test_progress_elsewhere_does_not_hide_a_standstill():
    rounds = PendingOperations(4)
    call(rounds, 0, 1, "x", None, math.inf, 0.0, "a", (0, 1))
    call(rounds, 1, 1, "y", None, math.inf, 0.0, "b", (0, 1))
    for second in range(1, 10):
        for rank in (2, 3):
            call(rounds, rank, second, "step", None, math.inf, float(second), "c", (2, 3))
        assert rounds.expire(float(second)) == []
    assert {answer.rank for answer in rounds.expire(10.0)} == {0, 1}


def test_a_lost_rank_fails_operations_at_which_it_has_arrived_too():
    rounds = PendingOperations(3)
    call(rounds, 2, 1, "x", None, math.inf, 0.0)
    call(rounds, 0, 1, "x", None, math.inf, 0.0)
    assert {answer.rank for answer in rounds.record_member_loss(2, "rank 2 is lost: unplugged")} == {0, 2}
    assert "rank 2 is lost" in add(rounds, 1, 1)[0][1]["failure"]


RANKS = 4
subsets = st.sets(st.integers(0, RANKS - 1), min_size=1).map(sorted).map(tuple)
programs = st.lists(st.tuples(subsets, st.sampled_from("xy")), max_size=12)


@given(programs, st.randoms(use_true_random=False), st.booleans())
def test_operations_of_any_subgroups_in_any_interleaving(operations, random, in_one_order):
    """With the calls in the same order, all ranks complete; otherwise they wait for each other, which is detected."""
    calls = {rank: [number for number, (ranks, _) in enumerate(operations) if rank in ranks] for rank in range(RANKS)}
    if not in_one_order:
        for numbers in calls.values():
            random.shuffle(numbers)
    rounds, waits, received = PendingOperations(RANKS), set(), {rank: [] for rank in range(RANKS)}
    while ready := [rank for rank in calls if calls[rank] and rank not in waits]:
        rank = random.choice(ready)
        waits.add(rank)
        number = calls[rank].pop(0)
        ranks, name = operations[number]
        for answer in call(rounds, rank, number, name, number, math.inf, 0.0, "here", ranks):
            received[answer.rank].append((answer.message["ticket"], answer.message["values"]))
            waits.remove(answer.rank)
        assert not (in_one_order and rounds._find_deadlocks())
    for got in received.values():
        for number, values in got:
            assert len(values) == len(operations[number][0])
            assert {operations[theirs] for theirs in values} == {operations[number]}
    assert {rank for entry in rounds._find_deadlocks() for rank in entry.locations} == waits
    assert {answer.rank for answer in rounds.expire(10.0)} == waits
    assert not in_one_order or not waits and rounds._operations == {}
