import pytest

from tfdist.coordination.handshake import Handshake, version_refusal
from tfdist.coordination.messages import VERSION, BadMessage

GROUP = Handshake(size=2, token="secret", noun="rank")
HELLO = {"type": "hello", "rank": 1, "size": 2, "version": VERSION, "pid": 12, "host": "b", "nonce": "n"}


def test_a_member_is_welcome():
    assert GROUP.refusal(HELLO, {0: "pid 11 on a"}) == version_refusal(HELLO) == ""


@pytest.mark.parametrize(
    "change, message",
    [
        ({"size": 3}, "Received: 3 from rank 1 (pid 12 on b), 2 from the process that serves"),
        ({"rank": 2}, "must be in [0, 2). Received: rank 2"),
        ({"rank": -1}, "must be in [0, 2). Received: rank -1"),
        ({"rank": 0}, "Received: rank 0 (pid 12 on b), already taken by pid 11 on a"),
    ],
)
def test_others_are_refused_with_what_is_wrong(change, message):
    assert message in GROUP.refusal({**HELLO, **change}, {0: "pid 11 on a"})


@pytest.mark.parametrize("version", [VERSION + 1, 1, None, "9" * 1000])
def test_another_version_is_refused_before_anything_else(version):
    refusal = version_refusal({"type": "hello", "version": version})
    assert f"where the job's is {VERSION}" in refusal and len(refusal) < 200


@pytest.mark.parametrize("message", [{"type": "gather"}, {**HELLO, "nonce": 1}])
def test_what_is_no_hello_is_a_bad_message(message):
    with pytest.raises(BadMessage):
        version_refusal(message)


@pytest.mark.parametrize("change", [{"rank": "1"}, {"size": None}, {"host": 3}])
def test_a_hello_that_is_incomplete_is_a_bad_message(change):
    with pytest.raises(BadMessage):
        GROUP.refusal({**HELLO, **change}, {})
