import pytest

from tfdist.coordination import Group, LocalGroup, LostMember
from tfdist.coordination.group import LAUNCHER, name_ranks
from tfdist.errors import InputError

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
