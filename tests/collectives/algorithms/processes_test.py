"""Algorithms between real processes: sums equal the engine's, with the same bits on every rank and in every repeat."""

import numpy as np
import pytest

from tests.workers import running
from tests.workers.all_reduce import SIZES

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("strategy", "size", "topology"),
    [
        pytest.param("multiworker", 3, "3", marks=pytest.mark.smoke("tensorflow")),
        ("horovod", 4, "2,2"),
        pytest.param("multiworker", 2, "2", marks=pytest.mark.full),
        pytest.param("multiworker", 4, "2,2", marks=pytest.mark.full),
        pytest.param("horovod", 2, "2", marks=pytest.mark.full),
    ],
)
def test_every_algorithm_sums_and_trains_like_the_engine(strategy, size, topology, tmp_path):
    ranks = running.outcomes("all_reduce", f"{strategy}(all_reduce='auto', {topology=})", size, tmp_path, seconds=300)
    assert set(ranks[0]) == {"engine", "ring", "tree", "halving_doubling", *["hierarchical"] * (size == 4)}
    everyones = [[np.random.default_rng([rank, n]).standard_normal(n) for n in SIZES] for rank in range(size)]
    for name, found in ranks[0].items():
        first = found["sums"][0]
        for repeat in (repeat for rank in ranks for repeat in rank[name]["sums"]):
            assert [x.tobytes() for x in repeat] == [x.tobytes() for x in first], name
        n = len(SIZES)
        for values, engine, own in zip(first[:n], first[n + 2 :], zip(*everyones, strict=True), strict=True):
            np.testing.assert_allclose(values, engine, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(values, sum(own), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(first[n], first[2], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(first[n + 1], first[1] / size, rtol=1e-4, atol=1e-5)
        for rank in ranks:
            for a, b, plain in zip(found["weights"], rank[name]["weights"], ranks[0]["engine"]["weights"], strict=True):
                assert a.tobytes() == b.tobytes()
                np.testing.assert_allclose(a, plain, rtol=1e-4, atol=1e-5)
