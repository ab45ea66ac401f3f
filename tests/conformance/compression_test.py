"""Every compression method with real processes: all ranks end with the same weights, bit for bit.

Registered methods are included automatically.
"""

import functools
import tempfile

import numpy as np
import pytest

from tests.gradients.compression.reducers import ARGUMENTS
from tests.workers import running
from tfdist.gradients.compression import METHODS

pytestmark = pytest.mark.processes

JOBS = (("horovod", 3), ("multiworker", 2))
ALL = ("none", *(ARGUMENTS.get(name, name) for name in METHODS), "topk(ratio=0.1)|fp16", "powersgd(rank=2)|bf16")


@functools.cache
def outcomes(strategy: str, size: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as directory:
        return running.outcomes("compression", strategy, size, directory, *ALL, seconds=400)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize(("strategy", "size"), [JOBS[0], pytest.param(*JOBS[1], marks=pytest.mark.full)])
def test_ranks_end_alike(strategy: str, size: int, method: str) -> None:
    ranks = [rank[method] for rank in outcomes(strategy, size)]
    assert len({rank["weights"] for rank in ranks}) == 1, "weights"
    assert len({rank["same"] for rank in ranks}) == 1, "what a method keeps as the same on all replicas"
    assert ranks[0]["losses"] == ranks[-1]["losses"]
    assert np.isfinite(ranks[0]["losses"]).all()


@pytest.mark.parametrize("method", ALL[1:])
@pytest.mark.parametrize(("strategy", "size"), [JOBS[0], pytest.param(*JOBS[1], marks=pytest.mark.full)])
def test_methods_differ_from_the_exact_sum(strategy: str, size: int, method: str) -> None:
    """Guards against comparing `none` under another name; the first loss precedes any compression."""
    [first, *_] = outcomes(strategy, size)
    assert first[method]["losses"][0] == first["none"]["losses"][0]
    assert first[method]["losses"][1:] != first["none"]["losses"][1:]


def test_compression_sends_less() -> None:
    [first, *_] = outcomes("horovod", 3)
    whole = first["none"]["payload_bytes"]
    for method, outcome in first.items():
        if method not in ("none", "threshold(value=0.01)"):  # what threshold sends is only known at run time
            assert outcome["payload_bytes"] < whole, method
