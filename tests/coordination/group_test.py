"""What all members of a group do together: they agree, compare large values by their digests, and share errors."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.coordination.members import members
from tests.waiting import DEADLINE
from tfdist.coordination import Group, LocalGroup, LostMember
from tfdist.coordination.all_equal import all_equal
from tfdist.coordination.group import LAUNCHER, name_ranks
from tfdist.coordination.shared_errors import refused_together
from tfdist.errors import InputError, PeerLostError

pytestmark = [pytest.mark.processes, pytest.mark.waits]


class Canned(Group):
    """Rank 1 of a group in which the values of the other members are given."""

    rank = 1

    def __init__(self, *others):
        self.others = list(others)
        self.size = len(others) + 1

    def gather(self, name, value, deadline=60.0):
        return [*self.others[:1], value, *self.others[1:]]

    def publish(self, topic, value):
        pass

    def subscribe(self, topic, callback):
        pass

    def on_loss(self, callback):
        pass

    def token_for(self, purpose):
        raise NotImplementedError

    def subgroup(self, ranks):
        raise NotImplementedError

    def leave(self, code=0, reason=""):
        pass


def test_agree_accepts_what_is_equal():
    Canned({"seed": 1, "b": [1, {"x": None}]}).agree("flags", {"b": [1, {"x": None}], "seed": 1}, "flag --")


@pytest.mark.parametrize(
    "others, mine, message",
    [
        (({"seed": 1}, {"seed": 1}), {"seed": 7}, "flag --seed differs: ranks 0, 2 have 1, rank 1 has 7. "),
        (({"seed": 1},), {}, "flag --seed differs: rank 0 has 1, rank 1 has nothing. "),
        (({"b": 1, "a": True},), {"b": 2, "a": 1}, "flag --a differs: rank 0 has true, rank 1 has 1. "),
    ],
)
def test_agree_names_the_first_key_that_differs_and_who_has_what(others, mine, message):
    with pytest.raises(InputError) as raised:
        Canned(*others).agree("flags", mine, "flag --")
    assert str(raised.value).startswith(message)


def test_broadcast_returns_the_roots_value():
    assert Canned("theirs").broadcast("x", "mine") == "theirs"
    assert Canned("theirs").broadcast("x", "mine", root=1) == "mine"


def test_the_group_of_one():
    group = LocalGroup()
    group.barrier("x")
    assert group.gather("x", (1, "a")) == [[1, "a"]]  # as if received from another process
    assert group.broadcast("x", 3) == 3
    group.agree("x", {"seed": 1}, "flag --")
    assert group.lost(wait=60.0) is None
    with pytest.raises(TypeError):
        group.gather("x", object())
    group.leave()


def test_roles_are_written_behind_ranks():
    group = LocalGroup()
    assert group.role(0) == ""
    group.roles = {1: "stage 1"}
    assert (group.role(0), group.role(1)) == ("", " (stage 1)")


def test_a_loss_in_words():
    assert str(LostMember(3, "gone")) == "rank 3 is lost: gone"
    assert str(LostMember(1, "gone", noun="node")) == "node 1 is lost: gone"
    assert str(LostMember(LAUNCHER, "gone")) == "the launcher is lost: gone"
    assert name_ranks([2]) == "rank 2" and name_ranks([2, 5], "node") == "nodes 2, 5"


@pytest.mark.parametrize("last, expected", [("x", True), ("y", False)])
def test_values_of_any_size_are_compared(last, expected):
    with members(2) as joined, ThreadPoolExecutor(2) as pool:
        values = [["x" * 2**21, 1.5, end] for end in ("x", last)]  # larger than a message of the group may be
        calls = [pool.submit(all_equal, member, "x", value) for member, value in zip(joined, values, strict=True)]
        assert [call.result(DEADLINE) for call in calls] == [expected, expected]


def test_one_member_has_one_value():
    assert all_equal(LocalGroup(), "x", {"a": [1, None]})


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InputError("The rule. Received: 3."), InputError, r"The rule\. Received: 3\."),
        (TypeError("no\nnumber."), InputError, r"Received on rank 1 \(last\): TypeError: no number\. Change the model"),
        (RuntimeError("bug"), PeerLostError, r"rank 1 \(last\) has failed: RuntimeError: bug"),
    ],
)
def test_an_error_of_one_member_reaches_all(job, error, kind, message):
    two = job(2)
    two.members[0].roles = {1: "last"}

    def call(member):
        try:
            with refused_together(member, "x"):
                if member.rank == 1:
                    raise error
        except Exception as raised:
            return raised
        return None

    for _ in range(2):  # the name may be used again
        first, last = two.all(call)
        assert last is error and type(first) is kind
        with pytest.raises(kind, match=message):
            raise first


def test_nothing_is_raised_if_all_accept(job):
    def call(member):
        with refused_together(member, "x"):
            return member.rank

    assert job(3).all(call) == [0, 1, 2]
    assert call(LocalGroup()) == 0


def test_the_loss_of_a_member_is_raised_at_once(job):
    two = job(2)

    def call(member):
        with pytest.raises(PeerLostError, match="gone"):
            with refused_together(member, "x"):
                raise PeerLostError("gone")

    call(two.members[0])
