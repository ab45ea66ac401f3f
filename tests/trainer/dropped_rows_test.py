"""Records and the log say what late ranks have left out."""

import numpy as np

from tfdist.step.running_metrics import RunningMetrics
from tfdist.trainer.dropped_rows import DroppedRows, fields_of

NONE = np.zeros([2, 3], np.int64)


def counts(rank: int, rows: int) -> np.ndarray:
    found = NONE.copy()
    found[:, rank] = rows, rows // 4
    return found


def test_fields():
    assert fields_of(np.zeros([2, 0])) == {}
    assert fields_of(NONE) == {"dropped_rows": 0, "dropped_micro_steps": 0}
    both = counts(2, 12) + counts(1, 8)
    assert fields_of(both) == {"dropped_rows": 20, "dropped_micro_steps": 5, "dropped_rank": 2}


def test_a_rank_is_named_at_first_and_when_its_rows_have_doubled():
    rows = DroppedRows(10, 100)
    assert rows.observe(NONE, 20) is None
    assert rows.observe(counts(1, 8), 30) == "Rows dropped by step 30: rank 1 8 (2 micro-steps); 0.4% of all."
    assert rows.observe(counts(1, 4), 40) is None
    assert rows.observe(counts(1, 4) + counts(2, 4), 50) == (
        "Rows dropped by step 50: rank 1 16 (4 micro-steps), rank 2 4 (1 micro-step); 0.5% of all."
    )


def test_a_limit_that_drops_most_rows_is_too_small():
    found = DroppedRows(0, 100).observe(counts(0, 600), 10)
    assert found.endswith("60.0% of all. Most rows are dropped: use a larger limit.")


def test_counts_are_kept_in_checkpoints_also_for_more_ranks():
    running = RunningMetrics()
    running.drop(counts(1, 8))
    resumed = RunningMetrics(running.to_json())
    resumed.drop(np.ones([2, 4], np.int64))
    assert resumed.dropped.tolist() == [[1, 9, 1, 1], [1, 3, 1, 1]]
    assert "dropped" not in RunningMetrics().to_json()
