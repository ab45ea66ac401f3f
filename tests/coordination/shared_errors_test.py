import pytest

from tfdist.coordination import LocalGroup
from tfdist.coordination.shared_errors import refused_together
from tfdist.errors import InputError, PeerLostError

pytestmark = [pytest.mark.processes, pytest.mark.waits]


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
