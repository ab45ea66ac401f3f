from hypothesis import given
from hypothesis import strategies as st

from tfdist.launcher.output_forwarding import MAX_LINE_BYTES, LineSplitter


def shown(lines, *pieces):
    return [line for piece in pieces for line in lines.feed(piece)]


@given(
    st.lists(st.binary().map(lambda text: text.replace(b"\n", b"").replace(b"\r", b"")), max_size=6), st.integers(1, 9)
)
def test_lines_are_whole_however_the_stream_is_cut(texts, cut):
    stream = b"".join(text + b"\n" for text in texts)
    lines = LineSplitter()
    assert shown(lines, *(stream[at : at + cut] for at in range(0, len(stream), cut))) == texts
    assert list(lines.end()) == []


def test_a_last_line_without_an_end_is_kept():
    lines = LineSplitter()
    assert shown(lines, b"one\ntw", b"o") == [b"one"]
    assert list(lines.end()) == [b"two"]
    assert list(lines.end()) == []


def test_a_carriage_return_before_the_end_belongs_to_it():
    assert shown(LineSplitter(), b"one\r\n", b"two\r", b"\nthree\n") == [b"one", b"two", b"three"]


def test_what_has_no_end_does_not_fill_the_memory():
    lines = LineSplitter()
    pieces = shown(lines, *[b"x" * 1000] * 200)
    assert pieces and max(map(len, pieces)) == MAX_LINE_BYTES
    assert sum(map(len, pieces)) + sum(map(len, lines.end())) == 200_000


def test_of_a_progress_bar_the_last_state_is_yielded_and_the_current_one_can_be_read():
    splitter = LineSplitter()
    assert [*splitter.feed(b"10%\r")] == [] and splitter.current_state == b"10%"
    assert [*splitter.feed(b"20%\r30")] == [] and splitter.current_state == b"30"
    assert [*splitter.feed(b"%\rdone\n40%")] == [b"done"] and splitter.current_state == b"40%"
    assert [*splitter.end()] == [b"40%"] and splitter.current_state == b""
