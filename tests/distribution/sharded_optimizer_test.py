"""Replicas with a part of the optimizer's state each train as replicas with all of it, bit for bit."""

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.workers import running

pytestmark = pytest.mark.processes

OF_TWO, OF_THREE = ("adamw-averaged", "clipping-scaled"), ("lamb-accumulated", "nadam-")
# Muon is not the first, whose state must be balanced: it has twice as much for a table, which alone is half of all.
OTHERS = ("lars-compressed", "muon-", "adamw-scaled", "adafactor-averaged")


def check(result: list[dict[str, dict[str, Any]]]) -> None:
    """Asserts that all ranks have the results of whole optimizers."""
    for case in result[0].keys() - {"fault"}:
        sharded, whole = [rank[case]["sharded"] for rank in result], result[0][case]["whole"]
        for number, rank in enumerate(sharded):
            for name in ("weights", "averages"):
                assert all(map(same, rank[name], whole[name])), (case, name)
            assert repr(rank["records"]) == repr(whole["records"]), case  # some are NaN
            assert [strip_counters(path) for path in rank["paths"]] == [strip_counters(p) for p in whole["paths"]]
            own = sum(value.nbytes for value in rank["state"] if value is not None)
            assert own == rank["bytes"][number], case
        for number, expected in enumerate(whole["state"]):
            held = [rank["state"][number] for rank in sharded if rank["state"][number] is not None]
            assert len(held) in (1, len(sharded))  # of one part, or of all
            assert all(same(value, expected) for value in held), (case, whole["paths"][number])
        assert any("skipped_steps" in record and record["skipped_steps"] for record in whole["records"]) == (
            "scaled" in case
        )


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()


def strip_counters(path: str) -> str:
    return path.partition("/")[2]


@pytest.mark.parametrize(
    ("strategy", "size", "cases"),
    [
        pytest.param("multiworker(shard='optimizer')", 2, OF_TWO, marks=pytest.mark.smoke),
        ("horovod(shard='optimizer')", 3, OF_THREE),
        pytest.param("multiworker(shard='optimizer')", 3, OTHERS, marks=pytest.mark.full),
        pytest.param("horovod(shard='optimizer')", 2, OTHERS, marks=pytest.mark.full),
    ],
)
def test_equal_to_whole_optimizers(strategy: str, size: int, cases: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    result = running.outcomes("sharded", strategy, size, tmp_path, *cases, seconds=60 + 30 * len(cases))
    check(result)
    first = result[0][cases[0]]
    assert max(first["sharded"]["bytes"]) < 1.4 / size * first["whole"]["bytes"][0]
    # Without the exchange of weights, replicas differ.
    assert not all(map(same, result[0]["fault"]["weights"], first["whole"]["weights"]))
    assert not all(map(same, result[0]["fault"]["weights"], result[1]["fault"]["weights"]))
