import pytest

from tfdist.errors import InputError
from tfdist.errors.byte_sizes import byte_size
from tfdist.grammar.byte_sizes import parse_byte_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (4, 4),
        ("4", 4),
        ("4B", 4),
        ("1k", 1024),
        ("64KB", 64 * 1024),
        ("64KiB", 64 * 1024),
        ("64kib", 64 * 1024),
        (" 1.5 MB ", 3 * 2**19),
        ("2GiB", 2**31),
        ("1TB", 2**40),
    ],
)
def test_units_are_powers_of_1024_with_and_without_i(text, count):
    assert parse_byte_size(text, "memory") == count


@pytest.mark.parametrize("text", ["64.0 KiB", "1.5 MiB", "2.0 GiB"])
def test_a_printed_size_is_parsed_as_the_same_size(text):
    assert byte_size(parse_byte_size(text, "memory")) == text


@pytest.mark.parametrize("size", [0, "0", "0.1", "", "-4KB", "4X", "4iB", "2 gigs", True, "MB", 1.5j, "1" * 19])
def test_errors_have_the_name_of_the_value(size):
    with pytest.raises(InputError) as error:
        parse_byte_size(size, "a size")
    assert str(error.value) == (
        "a size must be a number of bytes above 0, such as 512, 64KB or 2GiB; KB and KiB are 1024 bytes. "
        f"Received: {size!r}."
    )
