import pytest

from tfdist.errors.byte_sizes import byte_size


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (40 * 2**20, "40.0 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_are_in_the_unit_that_suits_them(count, text):
    assert byte_size(count) == text
