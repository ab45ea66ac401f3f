"""Numbers of replicas per host."""

import pytest

from tfdist.grammar.topology import parse_topology


@pytest.mark.parametrize(("text", "counts"), [("2,2", (2, 2)), ("1", (1,)), (" 2, 10 ", (2, 10))])
def test_numbers(text, counts):
    assert parse_topology(text) == counts


@pytest.mark.parametrize("text", ["", "2,,2", "0,4", "-1", "4.0", "two", "²,2", "02", "1" * 10])
def test_other_texts(text):
    assert parse_topology(text) is None
