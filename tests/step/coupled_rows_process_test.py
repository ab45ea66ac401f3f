"""Losses of a user are compared on every process: a layer may update a metric, which the chief alone would wait in."""

import pathlib

import keras
import pytest

import tfdist
from tests.selection import quick
from tests.workers import coupled_rows, running

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("strategy", quick(["multiworker", "horovod"], "multiworker"))
@pytest.mark.smoke
def test_a_mean_is_trained_and_a_sum_is_refused(strategy: str, single: tfdist.Strategy, tmp_path: pathlib.Path) -> None:
    alone = coupled_rows.fit(single, keras.ops.mean)
    for history, refusal in running.outcomes("coupled_rows", strategy, 2, tmp_path, seconds=200):
        assert history == {name: pytest.approx(values, rel=1e-5) for name, values in alone.items()}
        assert "A loss must be a mean over rows" in refusal and "what measured adds" in refusal
