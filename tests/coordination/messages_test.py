"""Messages of the control plane: how they are read, and which ones a member may begin with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.coordination.messages import BadMessage, MessageReader, encode, join_refusal

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(json_values, max_size=5), st.integers(1, 40))
def test_messages_arrive_whole_however_the_stream_is_cut(values, cut):
    sent = [{"type": "gather", "value": value} for value in values]
    stream = b"".join(map(encode, sent))
    lines = MessageReader(1 << 20)
    arrived = [message for at in range(0, len(stream), cut) for message in lines.feed(stream[at : at + cut])]
    assert arrived == sent


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_a_message_above_the_limit_is_refused(ending):
    assert list(MessageReader(100).feed(b'{"type":"' + b"x" * 89 + b'"}\n'))
    with pytest.raises(BadMessage, match="more than 100 bytes"):
        list(MessageReader(100).feed(b'{"type":"' + b"x" * 90 + b'"}' + ending))


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/1.1\r\n", b"[1]\n", b'{"no": "type"}\n', b'{"type": 3}\n', b"\xff\n", b"[" * 9999 + b"\n"]
)
def test_what_is_no_message_is_refused(line):
    with pytest.raises(BadMessage):
        list(MessageReader(1 << 20).feed(line))


def test_messages_that_are_not_taken_at_once_are_not_lost():
    reader = MessageReader(100)
    assert next(reader.feed(encode({"type": "a"}) + encode({"type": "b"}) + b'{"type"')) == {"type": "a"}
    assert list(reader.feed(b': "c"}\n')) == [{"type": "b"}, {"type": "c"}]


HELLO = {"type": "hello", "rank": 1, "size": 2, "pid": 12, "host": "b", "nonce": "n"}


def test_a_member_is_welcome():
    assert join_refusal(HELLO, 2, "rank", {0: "pid 11 on a"}) == ""


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
    assert message in join_refusal({**HELLO, **change}, 2, "rank", {0: "pid 11 on a"})


def test_an_incomplete_hello_is_a_bad_message():
    for change in ({"rank": "1"}, {"size": None}, {"host": 3}):
        with pytest.raises(BadMessage):
            join_refusal({**HELLO, **change}, 2, "rank", {})
