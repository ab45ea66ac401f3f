"""Comparison of large values by their digests."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.coordination.members import members
from tests.waiting import DEADLINE
from tfdist.coordination import LocalGroup
from tfdist.coordination.all_equal import all_equal

pytestmark = [pytest.mark.processes, pytest.mark.waits]


@pytest.mark.parametrize("last, expected", [("x", True), ("y", False)])
def test_values_of_any_size_are_compared(last, expected):
    with members(2) as joined, ThreadPoolExecutor(2) as pool:
        values = [["x" * 2**21, 1.5, end] for end in ("x", last)]  # larger than a message of the group may be
        calls = [pool.submit(all_equal, member, "x", value) for member, value in zip(joined, values, strict=True)]
        assert [call.result(DEADLINE) for call in calls] == [expected, expected]


def test_one_member_has_one_value():
    assert all_equal(LocalGroup(), "x", {"a": [1, None]})
