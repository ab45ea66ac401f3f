"""Slurm's lists of nodes and counts."""

import pytest

from tfdist.cluster.environment import expand_counts, first_host
from tfdist.errors import InputError


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("login1", "login1"),
        (" b,a ", "b"),
        ("gpu[09-10,12],login1", "gpu09"),
        ("r[1-2]n[1,3]", "r1n1"),
        ("rack[1-2]-ib.example.org", "rack1-ib.example.org"),
    ],
)
def test_the_first_host(text, host):
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", ",a", "gpu[1-2", "gpu[]", "gpu[a-b]", "a b"])
def test_what_is_no_list_of_nodes(text):
    with pytest.raises(InputError, match="must read like gpu"):
        first_host(text)


@pytest.mark.parametrize(("text", "expected"), [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x3)", [1, 2, 2, 2])])
def test_counts(text, expected):
    assert expand_counts(text) == expected


@pytest.mark.parametrize("text", ["", "4(x2", "x", "4,,3", "-1"])
def test_counts_refuses(text):
    with pytest.raises(InputError, match="task counts"):
        expand_counts(text)
