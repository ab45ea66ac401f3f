"""Subgroups are separate groups, whose messages name members by their ranks in the job."""

import threading
import time

import pytest

from tests.coordination.members import outcome
from tests.waiting import DEADLINE, wait_for
from tfdist.coordination import LocalGroup, LostMember

pytestmark = [pytest.mark.processes, pytest.mark.waits]


def halves(member):
    """Returns the subgroup of a rank: ranks 0 and 2, or 1 and 3."""
    return member.subgroup([member.rank % 2, member.rank % 2 + 2])


def test_disjoint_subgroups_use_one_name_at_the_same_time(job):
    four = job(4)
    first = four.start(halves(four.members[0]).gather, "x", 0)
    assert four.start(halves(four.members[1]).gather, "x", 1) and not first.done()
    assert halves(four.members[2]).gather("x", 2) == [0, 2] == first.result(DEADLINE)
    assert halves(four.members[3]).gather("x", 3) == [1, 3]
    assert [(half.rank, half.size, half.ranks) for half in map(halves, four.members.values())] == [
        (0, 2, (0, 2)),
        (0, 2, (1, 3)),
        (1, 2, (0, 2)),
        (1, 2, (1, 3)),
    ]
    assert four.all(lambda m: halves(m).broadcast("y", m.rank, root=1)) == [2, 3, 2, 3]
    assert four.all(lambda m: m.gather("x", m.rank)) == [[0, 1, 2, 3]] * 4


def test_overlapping_subgroups_do_not_meet(job):
    three = job(3)
    pairs = [(0, 1), (1, 2), (0, 2)]
    calls = {
        (pair, rank): three.start(three.members[rank].subgroup(pair).gather, "x", f"{rank} in {pair}")
        for pair in pairs
        for rank in pair
    }
    for (pair, _), call in calls.items():
        assert call.result(DEADLINE) == [f"{rank} in {pair}" for rank in pair]


def test_a_subgroup_of_a_subgroup_counts_its_own_ranks(job):
    five = job(5)
    within = {rank: five.members[rank].subgroup([4, 1, 2]).subgroup([2, 0]) for rank in (1, 4)}
    assert [(one.ranks, one.rank, one.size) for one in within.values()] == [((1, 4), 0, 2), ((1, 4), 1, 2)]
    other = five.start(within[4].gather, "x", "d")
    assert within[1].gather("x", "a") == ["a", "d"] == other.result(DEADLINE)


def test_the_subgroup_of_all_is_the_group(job):
    two = job(2)
    other = two.start(two.members[0].gather, "x", 0)
    assert two.members[1].subgroup([1, 0]).gather("x", 1) == [0, 1] == other.result(DEADLINE)
    one = LocalGroup()
    assert one.subgroup([0]) is one and list(one.ranks) == [0]


def test_messages_name_ranks_of_the_job(job):
    four = job(4, members=False)
    four.join(1), four.join(3)
    ours = [four.members[rank].subgroup([1, 2, 3]) for rank in (1, 3)]
    late = four.start(outcome, ours[1].barrier, "epoch", 600.0)
    wait_for(lambda: four.server._operations._operations)  # rank 3 has come
    expected = "rank 2 did not reach 'epoch' within 0.2 s (never connected: rank 2)."
    assert outcome(ours[0].barrier, "epoch", 0.2) == expected == late.result(DEADLINE)
    ours = [four.members[rank].subgroup([1, 3]) for rank in (1, 3)]
    other = four.start(outcome, ours[1].agree, "flags", {"seed": 3}, "--")
    said = "--seed differs: rank 1 has 7, rank 3 has 3. It must be the same on every process."
    assert outcome(ours[0].agree, "flags", {"seed": 7}, "--") == said == other.result(DEADLINE)


@pytest.mark.parametrize("ranks", [[0], [0, 0, 1], [1, 3], [-1, 1], []])
def test_ranks_that_are_no_subgroup(job, ranks):
    three = job(3)
    with pytest.raises(ValueError, match=r"ranks of a subgroup must be distinct, in \[0, 3\)"):
        three.members[1].subgroup(ranks)


def test_values_reach_the_members_alone(job):
    three = job(3)
    heard = {}
    for rank, member in three.members.items():
        for ranks in ((0, 1), (1, 2), (0, 1, 2)):
            if rank in ranks:
                member.subgroup(ranks).subscribe("x", heard.setdefault((rank, ranks), []).append)
    three.members[1].subgroup([0, 1]).publish("x", "to the first")
    three.members[1].subgroup([1, 2]).publish("x", "to the last")
    three.members[1].publish("x", "to all")
    wait_for(lambda: all(heard.values()))
    expected = {(0, 1): ["to the first"], (1, 2): ["to the last"], (0, 1, 2): ["to all"]}
    assert all(values == expected[ranks] for (_, ranks), values in heard.items())
    assert not any(
        member._client._publications._values for member in three.members.values()
    )  # none without a subscriber


@pytest.mark.parametrize("leaves", [True, False])
def test_the_end_of_another_process_fails_no_operation_of_a_subgroup(job, leaves):
    four = job(4)
    ours = {rank: four.members[rank].subgroup([1, 2]) for rank in (1, 2)}
    losses, of_all = [], []
    ours[1].on_loss(losses.append)
    four.members[1].on_loss(of_all.append)
    pending = four.start(outcome, ours[1].gather, "x", "a")
    whole = four.start(outcome, four.members[1].gather, "x", "a")
    wait_for(lambda: len(four.members[1]._client._pending) == 2)
    four.members[3].leave(0 if leaves else 3)
    ending = "has left with code 0" if leaves else "is lost: ended with code 3 (loss not finite)"
    assert whole.result(DEADLINE) == f"'x' cannot complete: rank 3 {ending}."
    assert ours[2].gather("x", "b") == ["a", "b"] == pending.result(DEADLINE)
    wait_for(lambda: len(of_all) == (not leaves))
    assert ours[1].first_loss() is None and not losses
    pending = four.start(outcome, ours[1].gather, "y", 0)
    wait_for(lambda: four.members[1]._client._pending)
    four.members[2].leave(3)
    lost = LostMember(2, "ended with code 3 (loss not finite)", 3)
    assert pending.result(DEADLINE) == f"'y' cannot complete: {lost}." and wait_for(ours[1].first_loss) == lost
    wait_for(lambda: losses)
    assert losses == [lost] and len(of_all) == 1
    assert ours[2].goodbye_code == 3 and ours[1].goodbye_code is None


def test_nothing_goes_on_without_the_server(job):
    three = job(3)
    ours = three.members[1].subgroup([1, 2])
    three.members[1]._client._report_server_loss("it was unplugged")
    assert outcome(ours.barrier, "x") == "'x' cannot complete: rank 0 is lost: it was unplugged."
    assert ours.first_loss() == LostMember(0, "it was unplugged")


def test_leaving_is_leaving_the_job(job):
    two = job(2)
    two.members[1].subgroup([1]).leave(3)
    assert two.members[1].goodbye_code == 3 and wait_for(two.members[0].first_loss) == LostMember(
        1, "ended with code 3 (loss not finite)", 3
    )


def test_ranks_that_wait_for_each_other_in_subgroups_are_told_so(job, monkeypatch):
    """Each thread stands for the main thread of a process."""
    monkeypatch.setattr(threading, "main_thread", threading.current_thread)
    monkeypatch.setattr("tfdist.coordination.server.DEADLOCK_SECONDS", 0.3)
    four = job(4, heartbeat=0.05)
    calls = [
        four.start(outcome, four.members[rank].subgroup([rank, other]).barrier, "x", 600.0)
        for rank, other in ((0, 1), (1, 2), (2, 0))
    ]
    end = time.monotonic() + DEADLINE
    while not all(call.done() for call in calls) and time.monotonic() < end:
        four.members[3].subgroup([3]).barrier("y")  # progress of another rank does not matter
    (said,) = {call.result(0) for call in calls}
    for part in (
        "rank 0 in 'x' of ranks 0, 1 at ",
        "rank 1 in 'x' of ranks 1, 2 at ",
        "rank 2 in 'x' of ranks 0, 2 at ",
    ):
        assert part in said
    assert "must make the same calls, in the same order" in said and "rank 3" not in said
