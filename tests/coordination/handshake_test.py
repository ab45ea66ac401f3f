import pytest

from tfdist.coordination.handshake import Handshake
from tfdist.coordination.messages import VERSION, BadMessage

GROUP = Handshake(size=2, token="secret", noun="rank")
HELLO = {"type": "hello", "rank": 1, "size": 2, "token": "secret", "version": VERSION, "pid": 12, "host": "b"}


def test_a_member_is_welcome():
    assert GROUP.refusal(HELLO, {0: "pid 11 on a"}) == ""


@pytest.mark.parametrize(
    "change, message",
    [
        ({"token": "other"}, "token must match the group's"),
        ({"token": "sécret"}, "token must match the group's"),
        ({"version": VERSION + 1}, f"version {VERSION + 1}, where the group's is {VERSION}"),
        ({"size": 3}, "Received: 3 from rank 1 (pid 12 on b), 2 from the process that serves"),
        ({"rank": 2}, "must be in [0, 2). Received: rank 2"),
        ({"rank": -1}, "must be in [0, 2). Received: rank -1"),
        ({"rank": 0}, "Received: rank 0 (pid 12 on b), already taken by pid 11 on a"),
    ],
)
def test_others_are_refused_with_what_is_wrong(change, message):
    assert message in GROUP.refusal({**HELLO, **change}, {0: "pid 11 on a"})


def test_nothing_but_the_token_is_told_to_one_without_it():
    assert "token" in GROUP.refusal({**HELLO, "token": "", "size": 9, "rank": 0, "version": 0}, {0: "pid 11 on a"})


@pytest.mark.parametrize("message", [{"type": "gather"}, {**HELLO, "rank": "1"}, {"type": "hello"}])
def test_what_is_no_hello_is_a_bad_message(message):
    with pytest.raises(BadMessage):
        GROUP.refusal(message, {})
