"""Sequences of collectives that differ between processes: every process names the first call that differs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

from tests.coordination.members import members
from tfdist.collectives import RecordedCall
from tfdist.collectives.trace_check import agree_on_plan
from tfdist.coordination import RemoteGroup
from tfdist.errors import InputError

SUM = RecordedCall("all_reduce", "gradients/0", (tf.float32, tf.float32), ((3, 4), (None,)))
LOSS = RecordedCall("all_reduce", "loss", (tf.float32,), ((),))


def said(plans: Sequence[Sequence[RecordedCall]]) -> list[str]:
    """Returns the error message of each of two members."""

    def tell(group: RemoteGroup, plan: Sequence[RecordedCall]) -> str:
        try:
            agree_on_plan(group, plan)
        except InputError as error:
            return str(error)
        return ""

    with members(2) as groups, ThreadPoolExecutor() as pool:
        return list(pool.map(tell, groups, plans, timeout=300))


def called(operation: str, name: str, *ranks: int) -> RecordedCall:
    return RecordedCall(operation, name, (tf.float32,), ((3,),), ranks)


def test_equal_plans() -> None:
    assert said([[SUM, LOSS], [SUM, LOSS]]) == ["", ""]


def test_groups_and_messages_are_compared_among_their_ranks() -> None:
    """Messages are sent and received in different orders, and rank 1 is in a group that rank 0 is not in."""
    first = [SUM, called("send", "a", 0, 1), called("receive", "b", 1, 0), called("send", "c", 0, 1)]
    second = [called("receive", "c", 0, 1), called("send", "b", 1, 0), SUM, called("receive", "a", 0, 1)]
    assert said([first, [*second, called("all_reduce", "alone", 1)]]) == ["", ""]


@pytest.mark.parametrize(
    ("mine", "other", "difference"),
    [
        ([SUM, LOSS], [SUM], "call 1: rank 0: all_reduce loss of float32[]; rank 1: nothing."),
        (
            [LOSS],
            [SUM],
            "call 0: rank 0: all_reduce loss of float32[]; rank 1: all_reduce gradients/0 of float32[3, 4], ",
        ),
        (
            [RecordedCall("all_gather", "x", (tf.float16,), ((2,),))],
            [RecordedCall("all_gather", "x", (tf.float32,), ((2,),))],
            "call 0: rank 0: all_gather x of float16[2]; rank 1: all_gather x of float32[2].",
        ),
        (
            [called("all_reduce", "x", 1, 0)],
            [called("all_gather", "x", 1, 0)],
            "Ranks [1, 0] must make the same calls of collectives. Received as call 0: rank 1: all_gather x of float32[3]; "
            "rank 0: all_reduce x of float32[3].",
        ),
        (
            [called("send", "x", 0, 1), called("send", "y", 0, 1)],
            [called("receive", "x", 0, 1)],
            "Ranks [0, 1] must make the same calls of collectives. Received as call 1: rank 0: message y of float32[3]; "
            "rank 1: nothing.",
        ),
        ([SUM], [SUM, called("receive", "x", 0, 1)], "call 0: rank 0: nothing; rank 1: message x of float32[3]."),
    ],
)
def test_the_first_difference_is_named_on_both(
    mine: list[RecordedCall], other: list[RecordedCall], difference: str
) -> None:
    first, second = said([mine, other])
    assert first == second
    assert difference in first and "\n" not in first
