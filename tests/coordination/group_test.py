"""What all members of a group do together: they agree, compare large values by their digests, and share errors."""

import pytest

from tests.coordination.members import outcome
from tfdist.coordination import LocalGroup, LostMember
from tfdist.coordination.group import LAUNCHER, name_ranks, raise_on_all_members
from tfdist.errors import InputError, PeerLostError

pytestmark = [pytest.mark.processes, pytest.mark.waits]


MANY = {f"n{i}": str(i) for i in range(1000)}


def agreed(job, *entries, **options):
    """Returns what each member says of its entries."""
    return job(len(entries)).all(lambda m: outcome(lambda: m.agree("x", entries[m.rank], "part ", **options)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{}, {}, {}], None),
        ([{"b": {"x": None, "y": [1]}}, {"b": {"y": (1,), "x": None}}], None),
        (
            [{}, {"n700": "x", "n900": "y"}, {"n800": "z"}],
            'part n700 differs: ranks 0, 2 have "700", rank 1 has "x". It must be the same on every process.',
        ),
        ([{}, {}, {"more": 1}], "part more differs: ranks 0, 1 have nothing, rank 2 has 1."),
        ([{"more": True}, {"more": 1}, {}], "part more differs: rank 0 has true, rank 1 has 1, rank 2 has nothing."),
    ],
)
def test_the_first_entry_that_differs_is_named_on_every_rank(job, changes, message):
    said = agreed(job, *(MANY | change for change in changes))
    assert len(set(said)) == 1 and (said[0] == message or said[0].startswith(message))


def test_entries_that_only_some_have_may_be_ignored(job):
    assert agreed(job, MANY | {"a": "1"}, MANY, MANY | {"b": "1"}, ignore_missing=True) == [None] * 3
    said = agreed(job, MANY | {"a": "1"}, MANY | {"a": "2"}, MANY, ignore_missing=True)
    assert said[2].startswith('part a differs: rank 0 has "1", rank 1 has "2", rank 2 has nothing.')


def test_the_group_of_one():
    group = LocalGroup()
    group.barrier("x")
    assert group.gather("x", (1, "a")) == [[1, "a"]]  # as if received from another process
    assert group.broadcast("x", 3) == 3
    group.agree("x", {"seed": 1}, "flag --")
    assert group.first_loss(wait=60.0) is None
    with pytest.raises(TypeError):
        group.gather("x", object())
    group.leave()


def test_a_loss_in_words():
    assert str(LostMember(3, "gone")) == "rank 3 is lost: gone"
    assert str(LostMember(1, "gone", noun="node")) == "node 1 is lost: gone"
    assert str(LostMember(LAUNCHER, "gone")) == "the launcher is lost: gone"
    assert name_ranks([2]) == "rank 2" and name_ranks([2, 5], "node") == "nodes 2, 5"


@pytest.mark.parametrize("last, expected", [("x", True), ("y", False)])
def test_values_of_any_size_are_compared(job, last, expected):
    large = "x" * 2**21  # larger than a message of the group may be
    assert job(2).all(lambda m: m.all_equal("x", [large, 1.5, ("x", last)[m.rank]])) == [expected, expected]


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
            with raise_on_all_members(member, "x"):
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
        with raise_on_all_members(member, "x"):
            return member.rank

    assert job(3).all(call) == [0, 1, 2]
    assert call(LocalGroup()) == 0


def test_the_loss_of_a_member_is_raised_at_once(job):
    two = job(2)

    def call(member):
        with pytest.raises(PeerLostError, match="gone"):
            with raise_on_all_members(member, "x"):
                raise PeerLostError("gone")

    call(two.members[0])
