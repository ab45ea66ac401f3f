"""Expansion of Slurm's host lists."""

import pytest

from tfdist.cluster.environment import expand_counts, expand_hosts
from tfdist.errors import InputError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("gpu[09-11]", ["gpu09", "gpu10", "gpu11"]),
        ("gpu[8-10]", ["gpu8", "gpu9", "gpu10"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("rack[1-2]-ib.example.org", ["rack1-ib.example.org", "rack2-ib.example.org"]),
        ("gpu[3]", ["gpu3"]),
        ("[1-2]", ["1", "2"]),
        ("b,a[2],a[1]", ["b", "a2", "a1"]),
        (" gpu1 ", ["gpu1"]),
    ],
)
def test_expand(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,,b",
        "gpu[1-2",
        "gpu1-2]",
        "gpu[]",
        "gpu[a-b]",
        "gpu[3-1]",
        "gpu[1[2]]",
        "a b",
        "x[1-9999999999]",
        "x[0-299]y[0-299]",
    ],
)
def test_expand_refuses(text):
    with pytest.raises(InputError, match="must read like gpu"):
        expand_hosts(text)


@pytest.mark.parametrize(("text", "expected"), [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x3)", [1, 2, 2, 2])])
def test_counts(text, expected):
    assert expand_counts(text) == expected


@pytest.mark.parametrize("text", ["", "4(x2", "x", "4,,3", "-1"])
def test_counts_refuses(text):
    with pytest.raises(InputError, match="task counts"):
        expand_counts(text)
