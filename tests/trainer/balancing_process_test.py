"""On real processes, a slow rank is allocated fewer rows, and the result is that of one device."""

import numpy as np
import pytest

from tests.selection import quick
from tests.workers import running, uneven

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("strategy", quick(["multiworker", "horovod"], "multiworker"))
@pytest.mark.smoke
def test_a_slow_rank_is_allocated_fewer_rows(strategy, single, float64, tmp_path):
    first, second = running.outcomes("uneven", strategy, 2, tmp_path, seconds=300)
    assert first.counts == second.counts
    assert sum(first.counts) == uneven.BATCH_SIZE
    assert second.used[0] == 16
    assert second.used[-1] <= 13  # of 32, where 10.7 would be ideal
    assert {a + b for a, b in zip(first.used, second.used, strict=True)} == {uneven.BATCH_SIZE}
    (tmp_path / "single").mkdir()
    alone = uneven.train(single, tmp_path / "single", "equal")
    for ours in (first, second):
        for a, b in zip(ours.weights, alone.weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
