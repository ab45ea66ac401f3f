"""Environment variables that are set for a while only."""

import os

import pytest

from tfdist.cluster.quiet_tensorflow import environment_variables


def test_variables_are_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_TEST_BEFORE", "1")
    monkeypatch.delenv("TFDIST_TEST_UNSET", raising=False)
    with (
        pytest.raises(ValueError, match="in the context"),
        environment_variables({"TFDIST_TEST_BEFORE": "2", "TFDIST_TEST_UNSET": "3"}),
    ):
        assert (os.environ["TFDIST_TEST_BEFORE"], os.environ["TFDIST_TEST_UNSET"]) == ("2", "3")
        raise ValueError("in the context")
    assert os.environ["TFDIST_TEST_BEFORE"] == "1" and "TFDIST_TEST_UNSET" not in os.environ
