import io

import pytest

from tfdist.process.unblocked_output import flush, print_line


class Stream(io.StringIO):
    """Notes each write, as a stream without a buffer makes a system call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def test_a_line_and_its_end_are_one_write() -> None:
    stream = Stream()
    print_line("rank 0 is lost", stream)
    assert stream.writes == ["rank 0 is lost\n"]


@pytest.mark.parametrize("action", [lambda stream: print_line("line", stream), flush])
def test_a_closed_stream_is_no_error(action) -> None:
    stream = Stream()
    stream.close()
    action(stream)
