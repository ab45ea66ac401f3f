import json

import pytest

from tfdist.errors import WriteError
from tfdist.reporting import RunPlan
from tfdist.reporting.outcome_file import OutcomeFile


def test_the_outcome_is_that_of_the_last_start(tmp_path):
    path = tmp_path / "outcome.json"
    for outcome in ("preempted", "done"):
        reporter = OutcomeFile(path, clock=lambda: 5.0)
        assert not path.exists()
        reporter.start(RunPlan(total_steps=1, batch_size=1))
        reporter.progress(1, {})
        reporter.record({"kind": "train", "step": 1})
        assert not path.exists()
        reporter.close(outcome)
        assert json.loads(path.read_text()) == {"outcome": outcome, "time": 5.0}


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(WriteError, match="must be able to write its files"):
        OutcomeFile(tmp_path / "no" / "outcome.json").close("done")
